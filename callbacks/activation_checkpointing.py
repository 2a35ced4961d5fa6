"""`ActivationCheckpointing`: chooses which activations a run keeps.

How that is done is in :mod:`lightning_4d.parallel.recompute`.
"""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from typing_extensions import override

from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.recompute import RecomputePolicy, install, remove


class ActivationCheckpointing(Callback):
    """Keep few activations between forward and backward, and compute the others again, with the same gradients.

    Works with the strategies of lightning_4d and with Lightning's single-device, DDP and model-parallel (FSDP2) ones.
    No module is wrapped or renamed: checkpoints stay as they are. Evaluation is untouched. The policy holds from the
    start of ``fit`` to its end, so another ``fit`` may have another.

    Args:
        policy: ``"sqrt"`` keeps the input of about √N segments of blocks; ``"full"`` the input of each block;
            ``"every_k"`` recomputes every k-th block; ``"selective"`` keeps the results of matrix products,
            convolutions and attention; ``"budget"`` recomputes as little as fits ``budget_bytes``; ``"none"`` nothing.
        blocks: ``"auto"``, or the dotted name of the ``nn.ModuleList`` or ``nn.Sequential`` of repeated layers, or
            several such names.
        segments: for ``"sqrt"``: the number of segments; ``"auto"`` takes the one with the lowest peak of the bytes
            measured in the first step.
        nested: for ``"sqrt"``: a second extra forward for still less memory.
        every_k: for ``"every_k"``: 2 recomputes every second block.
        budget_bytes: for ``"budget"``: bytes that the blocks of one rank may hold at the peak of a step.
        offload: hold the kept block inputs in pinned CPU memory, copied beside the computation. Of effect on CUDA only;
            on other devices they stay where they are.

    Raises:
        UnsupportedError: options that do not fit together, at once; a module or strategy that cannot be checkpointed,
            at the start of ``fit``; a block that cannot be computed twice, in the step where that shows.
    """

    def __init__(
        self,
        policy: Literal["none", "full", "sqrt", "every_k", "selective", "budget"] = "sqrt",
        blocks: str | list[str] = "auto",
        segments: int | Literal["auto"] = "auto",
        nested: bool = False,
        every_k: int | None = None,
        budget_bytes: int | None = None,
        offload: bool = False,
    ) -> None:
        self.policy = RecomputePolicy(policy, segments, nested, every_k, budget_bytes, offload)
        self.blocks = blocks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)):
            name = type(trainer.strategy).__name__
            raise UnsupportedError(
                explain(
                    f"ActivationCheckpointing with {name}",
                    "that strategy wraps modules and hides when their parameters are there",
                    "use NDStrategy, HSDPStrategy or ModelParallelStrategy, or the strategy's own checkpointing",
                )
            )
        callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if sum(isinstance(callback, ActivationCheckpointing) for callback in callbacks) > 1:
            raise UnsupportedError(
                explain("two ActivationCheckpointing callbacks", "a run has one policy", "leave one of them out")
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `setup`: the blocks may be made in `configure_model`, which runs after it. The hooks are innermost, so
        # they may also come after sharding and compiling.
        if self.policy.kind == "none":
            remove(pl_module)
        else:
            stages = getattr(trainer.strategy, "stage_runs", None)
            install(pl_module, self.policy, self.blocks, stages)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        remove(pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        remove(pl_module)
