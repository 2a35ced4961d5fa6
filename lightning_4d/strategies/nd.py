"""`NDStrategy`: the one class that translates between Lightning and the mechanisms of :mod:`lightning_4d.parallel`.

Its hooks are a few lines each: what they do is in the mechanism that they call.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_only as pytorch_rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_4d.checkpoint.optimizer_state import parameter_names
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.mesh import Mesh, agree_on_groups, forget_groups, made_once
from lightning_4d.parallel.blocks import find_blocks
from lightning_4d.parallel.context import divided
from lightning_4d.parallel.data import DataParallel, DataParallelOptions, MetaInitialization, shard, sharded
from lightning_4d.parallel.gradients import Elsewhere
from lightning_4d.parallel.pipeline.engine import Pipeline
from lightning_4d.parallel.recompute import StageRuns
from lightning_4d.parallel.same_way import asked_for_rank
from lightning_4d.parallel.tensor import TensorOptions, TensorParallel, applied, divide
from lightning_4d.strategies import random_state
from lightning_4d.strategies.checkpointing import CheckpointTranslator
from lightning_4d.strategies.crossings import Crossings
from lightning_4d.strategies.data_position import seed_workers
from lightning_4d.strategies.evaluation import EvaluationBalance
from lightning_4d.strategies.failure import Failure
from lightning_4d.strategies.model_ranks import ContextOptions, ModelRanks, install_context, watch_blocks
from lightning_4d.strategies.pipeline_metrics import normalise_over, reduce_over
from lightning_4d.strategies.pipeline_steps import PipelineOptions, PipelineSteps
from lightning_4d.strategies.placement import say_what_crosses
from lightning_4d.strategies.precision import adapt_precision_plugin
from lightning_4d.strategies.summary import describe_division
from lightning_4d.strategies.support import (
    converts_to,
    refuse_changed_model,
    refuse_flattening,
    refuse_foreign_parameters,
    refuse_in_pipeline,
    refuse_lost_metrics,
    refuse_unsupported,
)

Size = int | Literal["auto"]


class NDStrategy(ParallelStrategy):
    """Train an ordinary LightningModule on any layout of pipeline, data, context and tensor axes.

    The numbers are those of plain DDP with as many data-parallel ranks.

    Args:
        data_parallel_replicate_size: ranks that hold the same shard; gradients are all-reduced among them.
        data_parallel_shard_size: ranks that share one copy of parameters, gradients and optimizer states (FSDP2).
            At most one size is ``"auto"``: what remains of the world after the others.
        context_parallel_size: ranks that share a sequence.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: ranks that hold consecutive stages of layers.
        blocks: the dotted name of the ``nn.ModuleList`` or ``nn.Sequential`` of repeated layers, or several names;
            ``"auto"`` finds them.
        compile_blocks: compile the forward of each block by ``torch.compile``.
        reshard_after_forward: free gathered parameters of a block between its forward and its backward; ``"auto"``:
            when the shard size is above 1; with pipeline stages, where microbatches follow each other, not.
        context_parallel_attention: "ring" passes keys and values round; "ulysses" exchanges heads for positions;
            "hybrid" does the latter inside groups of ``ulysses_size`` ranks and the former between them.
        ulysses_size: the Ulysses part of "hybrid"; ``"auto"``: the ranks of a node.
        sequence_dim: which dim of the blocks' input the context-parallel ranks divide; ``"auto"`` finds it.
        pipeline_schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``, ``interleaved_zero_bubble``,
            ``zbv`` or ``dualpipev``, also in torch's spellings.
        num_microbatches: how many pieces of a batch pass through the pipeline stages; ``"auto"``: as many as suit the
            schedule and the batch.
        pipeline_split: the first block of each pipeline stage, by name or number; ``"auto"``: by cost.
        loss_reduction: how the losses of microbatches make the batch's loss; ``"auto"`` finds out.
        tensor_parallel_plan: ``"auto"`` finds how layers are divided over ``tensor_parallel_size`` ranks
            (``lightning-4d explain`` prints it); or ``{module pattern: style}``, such as
            ``{"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}``.
        sequence_parallel: between the divided layers, keep each tensor-parallel rank's part of the sequence only.
        save_distributed_checkpoint: a folder that all ranks write, or else one ordinary ``.ckpt`` file.
        process_group_backend: by default ``nccl`` on CUDA and ``gloo`` on CPU.
        timeout: how long a collective may wait for a rank.

    Raises:
        LayoutError: sizes that do not fit the world, as soon as the Trainer is made.
        UnsupportedError: something that could not give the numbers of plain DDP, at set-up, by name.
    """

    strategy_name = "nd"

    def __init__(
        self,
        data_parallel_replicate_size: Size = 1,
        data_parallel_shard_size: Size = "auto",
        context_parallel_size: Size = 1,
        tensor_parallel_size: Size = 1,
        pipeline_parallel_size: Size = 1,
        blocks: str | list[str] = "auto",
        compile_blocks: bool = False,
        reshard_after_forward: bool | Literal["auto"] = "auto",
        context_parallel_attention: Literal["ring", "ulysses", "hybrid"] = "ring",
        ulysses_size: Size = "auto",
        sequence_dim: Size = "auto",
        pipeline_schedule: str = "1f1b",
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_split: Literal["auto"] | list[str] | list[int] = "auto",
        loss_reduction: Literal["auto", "mean", "sum"] = "auto",
        tensor_parallel_plan: Mapping[str, str] | Literal["auto"] = "auto",
        sequence_parallel: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__()
        self._sizes: dict[str, Size] = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_replicate_size": data_parallel_replicate_size,
            "data_parallel_shard_size": data_parallel_shard_size,
            "context_parallel_size": context_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
        }
        self._blocks = blocks
        self._options = DataParallelOptions(reshard_after_forward=reshard_after_forward, compile_blocks=compile_blocks)
        self._tensor_options = TensorOptions(tensor_parallel_plan, sequence_parallel, compile_blocks)
        self._tensor: TensorParallel | None = None
        self._context_options = ContextOptions(context_parallel_attention, ulysses_size, sequence_dim)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self.num_nodes = 1  # set by the Trainer
        self._layout: ParallelLayout | None = None
        self._mesh: Mesh | None = None
        self._model_ranks: ModelRanks | None = None
        self._data: DataParallel | None = None  # None again while a run has not reached set-up
        self._initialization = MetaInitialization()
        options = PipelineOptions(pipeline_schedule, num_microbatches, pipeline_split, loss_reduction)
        self._pipeline = PipelineSteps(self, options)
        self._checkpoints = CheckpointTranslator(self, distributed=save_distributed_checkpoint)
        self._failure = Failure(self)
        self._evaluation = EvaluationBalance(self)

    # ------------------------------------------------------------------------------------------------------ the ranks

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of all axes, resolved against the world size."""
        if self._layout is None:
            raise UnsupportedError(
                explain("strategy.layout before the Trainer", "sizes resolve against the devices", "make the Trainer")
            )
        return self._layout

    @property
    def mesh(self) -> Mesh:
        """The device mesh: axes, coordinates and groups of this rank. Available from ``setup`` on."""
        if self._mesh is None:
            raise UnsupportedError(
                explain("strategy.mesh before set-up", "the mesh needs all processes", "read it from setup() on")
            )
        return self._mesh

    @property
    def data(self) -> DataParallel:
        """The sharded module, from the strategy's set-up on."""
        assert self._data is not None
        return self._data

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are written as folders."""
        return self._checkpoints.distributed

    @property
    @override
    def global_rank(self) -> int:
        asked_for_rank()
        return super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        asked_for_rank()
        return super().local_rank

    @property
    def data_parallel_rank(self) -> int:
        """This rank's index among the ranks that read different data: what an IterableDataset splits by."""
        return self.layout.data_parallel_rank(super().global_rank)

    @property
    def data_parallel_size(self) -> int:
        """How many ranks read different data."""
        return self.layout.data_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Whether ranks read different data: Lightning then inserts samplers, and reduces metrics that ask for it."""
        return self.layout.data_parallel_size > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[super().local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the default process group."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the loggers this process's rank; called by the Trainer."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = pytorch_rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._layout = self._resolve_layout()  # a layout that does not fit is refused before processes start
        if self.world_size > 1 and not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _resolve_layout(self) -> ParallelLayout:
        return ParallelLayout.resolve(self.world_size, **self._sizes)

    # --------------------------------------------------------------------------------------------------------- set-up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._failure.new_run()
        self._checkpoints.new_run()
        self._data = None
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        device_id = None if self.root_device.type == "cpu" else self.root_device
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment, self._process_group_backend, timeout=self._timeout, device_id=device_id
        )
        agree_on_groups(self.root_device)
        if self._mesh is None:
            layout, device_type = self.layout, self.root_device.type
            self._mesh = made_once(("mesh", layout, device_type), lambda: Mesh(layout, device_type))

    @contextlib.contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Not on the root device: a block moves there when it is sharded.
        device = torch.device("meta") if empty_init else contextlib.nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self._initialization.observe():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_unsupported(trainer, self)
        if self.has_stages:
            refuse_in_pipeline(trainer)
        self._checkpoints.agree_on_path()
        random_state.share(self.mesh, self.layout)
        self._data = self._shard(trainer)
        self._model_ranks = ModelRanks(self)
        self._checkpoints.load_pending_model()
        _allow_autograd_after_evaluation(trainer)
        self.barrier("setup")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for line in describe_division(self):
            rank_zero_info(line)
        if self.data_parallel_size == 1:  # every rank logs the value of all samples
            warnings.filterwarnings("ignore", message=r".*sync_dist=True.* when logging on epoch level in distributed")
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, trainer: Trainer) -> DataParallel:
        """Apply the axes in their order: pipeline stages, tensor plan, data axes."""
        module = self._module
        existing = sharded(module)
        if existing is not None and (existing.units or applied(module) is not None):
            refuse_changed_model(module, existing, self.layout, self.precision_plugin)
            self._tensor = applied(module)
            if self.has_stages:
                self._pipeline.reuse(trainer, module)
            return existing
        refuse_lost_metrics(module)
        self.model = self.precision_plugin.convert_module(module)
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
            normalise_over(self.model, self.mesh.data_parallel_group)
        blocks = find_blocks(module, self._blocks)
        context = install_context(module, blocks, self)
        released, options = None, self._options
        if self.has_stages:
            self._pipeline.plan(trainer, module, blocks)
            released = self._pipeline.released(module)
            options = replace(options, reshard_after_forward=options.reshard_after_forward is True)
        self._tensor = divide(module, blocks, self.mesh, self._tensor_options)
        distribute = None if self._tensor is None else self._tensor.distribute
        boundaries = None if self._tensor is None or self.mesh.parameter_size == 1 else self._tensor.boundaries()
        if boundaries is not None:
            boundaries.install_inside()
        plan = None if self._tensor is None else self._tensor.plan
        say_what_crosses(self.layout, self.num_processes, blocks, plan, self.root_device)
        data = shard(module, blocks, self.mesh, self.root_device, options, self._initialization, released, distribute)
        if boundaries is not None:
            boundaries.install_outside()
        if context is not None:
            context.install_outside()
        watch_blocks(blocks, self)
        data.converted_to = converts_to(self.precision_plugin)
        self.model_to_device()  # what is neither parameter nor buffer: metric states
        data.settle()
        if self.layout.model_parallel_size > 1:
            reduce_over(module, self.mesh.data_parallel_group)
        if self.has_stages:
            self._pipeline.attach(module)
        return data

    @override
    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        manual = not self._module.automatic_optimization
        for optimizer in self.optimizers:
            refuse_flattening(optimizer, self.layout)
            refuse_foreign_parameters(optimizer, self._module, self.data)
            self.data.watch_optimizer(optimizer, manual=manual)
        if manual and self.data.units:
            _mirror_toggled_optimizers(self._module, self.data)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        adapt_precision_plugin(self.precision_plugin, self.data, self._elsewhere)

    @property
    def has_stages(self) -> bool:
        """Whether the blocks are divided into pipeline stages."""
        return self.layout.pipeline_parallel_size > 1

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline stages of this rank, from set-up on; only where there are some."""
        return self._pipeline.pipeline

    @property
    def pipeline_schedule(self) -> str:
        """The name of the pipeline schedule."""
        return self._pipeline.schedule

    @property
    def stage_runs(self) -> StageRuns | None:
        """What activation checkpointing has to know of pipeline stages; None without them."""
        return self._pipeline.stage_runs() if self.has_stages else None

    @property
    def gathers_for_stage(self) -> bool:
        """Whether this rank gathers what its pipeline stages hold for a single-file checkpoint."""
        coordinate = self.mesh.coordinate
        return all(coordinate[axis] == 0 for axis in coordinate if axis != "pp")

    def saved_elsewhere(self) -> set[str]:
        """Names of the state dict that another pipeline rank saves."""
        return self._pipeline.saved_elsewhere(self._module) if self.has_stages else set()

    @property
    def sequence_dim(self) -> int | None:
        """Which dim of the blocks' inputs is the sequence's, if the user named it."""
        dim = self._context_options.sequence_dim
        return dim if isinstance(dim, int) else None

    @property
    def context_parallel_attention(self) -> str:
        """How context-parallel ranks compute attention: ring, ulysses or hybrid."""
        return self._context_options.attention

    @property
    def tensor(self) -> TensorParallel | None:
        """The division of layers, from set-up on; None without one."""
        return self._tensor

    def crossings(self) -> Crossings:
        """Return how divided tensors cross from stage to stage; at set-up, when they are divided."""
        return Crossings(divided(self._module), self._tensor)

    def _elsewhere(self) -> Elsewhere | None:
        if not self.has_stages:
            return None
        return Elsewhere(self.mesh["pp"].get_group(), self._pipeline.counted_elsewhere())

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---------------------------------------------------------------------------------------------------------- steps

    @override
    def process_dataloader(self, dataloader: object) -> object:
        seed_workers(dataloader, self.data_parallel_rank)
        return self._checkpoints.resumable(dataloader)

    @property
    def model_ranks(self) -> ModelRanks:
        """The ranks that work together on the same samples, from set-up on."""
        assert self._model_ranks is not None
        return self._model_ranks

    @override
    def on_train_start(self) -> None:
        self._checkpoints.on_train_start()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.has_stages:
            return self._pipeline.training_step(*args)
        with self.precision_plugin.train_step_context():
            step = self.model_ranks.checked(self._module.training_step)
            return self.data.run_training_step(step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.has_stages:
            return self._run_stages("validation_step", self.precision_plugin.val_step_context, *args)
        with self.precision_plugin.val_step_context():
            return self._evaluation.run(self.model_ranks.checked(self._module.validation_step), *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.has_stages:
            return self._run_stages("test_step", self.precision_plugin.test_step_context, *args)
        with self.precision_plugin.test_step_context():
            return self._evaluation.run(self.model_ranks.checked(self._module.test_step), *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_stages:
            return self._run_stages("predict_step", self.precision_plugin.predict_step_context, *args)
        with self.precision_plugin.predict_step_context():
            return self._evaluation.run(self.model_ranks.checked(self._module.predict_step), *args, **kwargs)

    def _run_stages(self, name: str, context: Callable[[], AbstractContextManager[Any]], *args: Any) -> Any:
        return self._evaluation.run(partial(self._pipeline.evaluation_step, name, context), *args)

    @override
    def on_validation_start(self) -> None:
        self._evaluation.start()

    @override
    def on_validation_end(self) -> None:
        self._evaluation.finish()

    @override
    def on_test_end(self) -> None:
        self._evaluation.finish()

    @override
    def on_predict_end(self) -> None:
        self._evaluation.finish()

    @override
    def on_test_start(self) -> None:
        self._evaluation.start()

    @override
    def on_predict_start(self) -> None:
        self._evaluation.start()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.pre_backward(closure_loss)
        self.data.before_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        with self.model_ranks.backward():
            self.precision_plugin.backward(loss, self._module, optimizer, *args, **kwargs)
        self.data.after_backward()  # before the user's on_after_backward sees gradients
        loss = self.precision_plugin.post_backward(loss, self._module)
        self.post_backward(loss)
        return loss

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.data.no_gradient_sync():
            yield

    # ---------------------------------------------------------------------------------------------------- collectives

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a tensor over ``group``, by default the ranks that read different data; other values unchanged."""
        if not isinstance(tensor, Tensor) or not _distributed_is_initialized():
            return tensor
        return _sync_ddp_if_available(tensor, group or self.mesh.data_parallel_group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks: whether all, or any, of them decided so."""
        votes = torch.tensor(int(decision), device=self.root_device)
        if _distributed_is_initialized():
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized() or self._failure.is_alone():
            return
        device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=device_ids)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    # ---------------------------------------------------------------------------------------------------- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Lightning reads it before set-up, as for DDP, and then hands on `weights_only`. Weights wait for set-up.
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return self._checkpoints.optimizer_state(optimizer, parameter_names(self._module))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        self._checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.open(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_model(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self._checkpoints.remove(filepath)

    # --------------------------------------------------------------------------------------------------------- ending

    @override
    def on_exception(self, exception: BaseException) -> None:
        forget_groups()
        self._failure.end(exception)

    @override
    def teardown(self) -> None:
        # Unlike the base class, leave the module where it is: sharded parameters stay on their device.
        if self._data is not None and not self._failure.is_alone():
            self._data.settle()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _allow_autograd_after_evaluation(trainer: Trainer) -> None:
    """Use ``no_grad`` instead of ``inference_mode``, which would mark gathered parameters for ever."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop.inference_mode = False


def _mirror_toggled_optimizers(module: LightningModule, data: DataParallel) -> None:
    """Let ``toggle_optimizer`` inside a step reach the gathered parameters that the step uses."""
    cls = type(module)

    def toggle(optimizer: Any) -> None:
        cls.toggle_optimizer(module, optimizer)
        data.mirror_requires_grad()

    def untoggle(optimizer: Any) -> None:
        cls.untoggle_optimizer(module, optimizer)
        data.mirror_requires_grad()

    object.__setattr__(module, "toggle_optimizer", toggle)
    object.__setattr__(module, "untoggle_optimizer", untoggle)
