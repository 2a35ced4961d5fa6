"""FLOPs of a training step: counted on fake tensors, and by formula for transformers.

The count is what the model needs, whatever the layout, the checkpointing and the accumulation of a run: a forward,
and in the backward a product for each input and each weight that needs a gradient (three times the forward where all
do). It costs no memory and no communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_4d.utilization.counter import AttentionFlops, FlopCounter, Flops, Phase
from lightning_4d.utilization.isolation import FakeRun, faked


class CountError(RuntimeError):
    """The step could not be counted; the message says why, and what to do."""


@dataclass(frozen=True)
class StepFlops:
    """What one training step on one batch computes, of the whole model whatever its layout.

    Attributes:
        forward: of the model.
        backward: of the model; only what needs a gradient.
        recompute: repeated forwards that the user's own checkpointing makes. That of ``ActivationCheckpointing`` is off
            during the count, see ``extra_forwards`` of :meth:`hardware`.
        kernel: what fused attention kernels repeat inside their backward (one of two products).
        blocks: forward FLOPs by block.
        dtype: that of most FLOPs.
        small_fraction: share of forward FLOPs in matrix products with a dimension below 128.
        attention_calls: forward calls of attention by kind: "causal", "masked" (an explicit mask), "full".
    """

    forward: Flops
    backward: Flops
    recompute: Flops
    kernel: Flops
    blocks: Mapping[str, Flops] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    small_fraction: float = 0.0
    attention_calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def training(self) -> Flops:
        """Forward and backward of the model."""
        return self.forward + self.backward

    def model(self, attention: AttentionFlops = "causal") -> int:
        """Return the model FLOPs of the step, with causal attention counted in half or in full."""
        return self.training.of(attention)

    def hardware(
        self, attention: AttentionFlops = "causal", extra_forwards: Mapping[str, float] | None = None
    ) -> float:
        """Return the FLOPs that are executed, without the optimizer's.

        Args:
            attention: the convention, as in :meth:`model`.
            extra_forwards: by block, how often its forward is repeated (a fraction where only part of it is).
        """
        repeated = sum(n * self.blocks[name].of(attention) for name, n in (extra_forwards or {}).items())
        return (self.training + self.recompute + self.kernel).of(attention) + repeated


def count_step(
    module: nn.Module,
    step: Callable[[FakeRun, Callable[[Tensor], None]], Tensor | None],
    device: torch.device,
    *,
    blocks: Mapping[str, nn.Module] | None = None,
    overrides: Mapping[str, Any] | None = None,
    context: AbstractContextManager[Any] | None = None,
) -> StepFlops:
    """Count one training step on fake tensors; the module, its metrics and all random states stay as they are.

    Args:
        module: the module that ``step`` uses, sharded or not, compiled or not.
        step: gets the running :class:`FakeRun`, whose ``tensor`` makes fakes of the batch's tensors, and a function to
            call instead of ``loss.backward()`` where the step runs its own backward. Returns the loss that remains to
            be run backward, or None.
        device: of the module's parameters during training.
        blocks: modules by name, to be counted apart as well.
        overrides: attributes of ``module`` to replace meanwhile.
        context: around the step, for instance autocast.

    Raises:
        CountError: the step cannot run without data (``if loss.isnan()``, ``.numpy()``), or calls an operation whose
            FLOPs are not known.

    Which ranks must call: none has to; there is no communication.
    """
    counter = FlopCounter(blocks)

    def backward(loss: Tensor) -> None:
        with counter.backward():
            loss.backward()

    try:
        with faked(module, device, overrides or {}) as run, context or nullcontext(), counter.running(run.whole):
            loss = step(run, backward)
            if loss is not None:
                backward(loss)
    except Exception as error:  # whatever user code raises without data
        raise CountError(
            f"the step does not run on fake tensors ({type(error).__name__}: {_first_line(error)})"
        ) from error
    return _result(counter)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _result(counter: FlopCounter) -> StepFlops:
    if counter.unknown:
        raise CountError(
            f"the FLOPs of {', '.join(sorted(counter.unknown))} are not known; give them by "
            "torch.utils.flop_counter.register_flop_formula (0 if it multiplies no matrices)"
        )
    forward = counter.phases[Phase.FORWARD]
    if forward.total == 0:
        raise CountError("no matrix product, convolution or attention runs in the step")
    return StepFlops(
        forward=forward,
        backward=counter.phases[Phase.BACKWARD],
        recompute=counter.phases[Phase.RECOMPUTE],
        kernel=counter.phases[Phase.KERNEL],
        blocks=dict(counter.blocks),
        dtype=_most_common(counter.dtypes),
        small_fraction=counter.small / forward.total,
        attention_calls=dict(counter.attention_calls),
    )


def _most_common(dtypes: Counter[torch.dtype]) -> torch.dtype:
    return dtypes.most_common(1)[0][0] if dtypes else torch.float32


# ---------------------------------------------------------------------------------------------------------- formulas


def transformer_flops(
    *,
    parameters: float,
    tokens: float,
    layers: int,
    attention_width: int,
    length: int,
    attention: AttentionFlops = "full",
    recomputed_parameters: float = 0.0,
    recomputed_attention: float = 0.0,
) -> float:
    """Return the FLOPs of training a transformer on ``tokens`` tokens: 6·N·D plus 12·L·(H·Q)·T·D of attention.

    Args:
        parameters: N, of all matrices that a token meets: with the head, without embeddings that are looked up only.
        tokens: D.
        layers: L.
        attention_width: H·Q, heads times their dimension (the query heads', with grouped keys and values).
        length: T, of a sequence.
        attention: "full" counts all T² scores (PaLM, Korthikanti et al., torchtitan); "causal" half of them (Megatron
            since 2026, Automodel).
        recomputed_parameters: for hardware FLOPs, the parameters whose products are repeated once in the backward.
        recomputed_attention: for hardware FLOPs, how often attention's forward is repeated.

    PaLM 540B per token (its Table 22: 3.28 TFLOPs, and 4.10 with rematerialization):

    >>> N = 540.35e9
    >>> palm = dict(parameters=N, tokens=1, layers=118, attention_width=48 * 256, length=2048)
    >>> round(transformer_flops(**palm) / 1e12, 2)
    3.28
    >>> round(transformer_flops(**palm, recomputed_parameters=0.75 * N, recomputed_attention=1) / 1e12, 2)
    4.1
    """
    scores_and_values = 4 * layers * attention_width * length * (0.5 if attention == "causal" else 1.0)
    matrices = 6 * parameters + 2 * recomputed_parameters
    return tokens * (matrices + (3 + recomputed_attention) * scores_and_values)


def gpt_parameters(layers: int, hidden: int, vocab: int) -> int:
    """Return the matrix parameters of a GPT: 12·h² per layer, and one h·v for the head (the lookup costs nothing)."""
    return 12 * layers * hidden**2 + vocab * hidden


def looked_up_parameters(module: nn.Module) -> int:
    """Return how many elements only a lookup uses: embeddings whose weight no other module shares."""
    users: Counter[int] = Counter()
    weights: dict[int, int] = {}
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None:
                users[id(parameter)] += 1
                if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
                    weights[id(parameter)] = parameter.numel()
    return sum(size for key, size in weights.items() if users[key] == 1)


def optimizer_flops(parameters: Iterable[Tensor], states: Mapping[Any, Mapping[str, Any]]) -> int:
    """Estimate the FLOPs of an optimizer step: per element, 2 for the update and 5 for each state of the same shape.

    12 for Adam, 7 for momentum. That is a few millionths of a transformer's step; optimizers that multiply matrices
    (Muon, Shampoo) execute more than this. Of a sharded parameter, the part of this rank.
    """
    total = 0
    for parameter in parameters:
        kept = [s for s in states.get(parameter, {}).values() if isinstance(s, Tensor) and s.shape == parameter.shape]
        here = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[attr-defined]
        total += here.numel() * (2 + 5 * len(kept))
    return total
