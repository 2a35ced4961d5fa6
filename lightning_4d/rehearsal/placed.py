"""Set up a module on one rank of a layout as the strategies do: stages, tensor plan, sequences, shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_4d.absent import Released, is_absent
from lightning_4d.mesh import Mesh
from lightning_4d.parallel.blocks import Block, find_blocks
from lightning_4d.parallel.context import ContextParallel, make_groups, ulysses_size_of
from lightning_4d.parallel.data import DataParallel, DataParallelOptions, MetaInitialization, shard
from lightning_4d.parallel.pipeline.batch import bounds, cut, rows_of, signature
from lightning_4d.parallel.pipeline.engine import Pipeline
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.record import StepRecord
from lightning_4d.parallel.pipeline.schedule import (
    action_list,
    check_microbatches,
    choose_microbatches,
    find_schedule,
    for_microbatches,
    in_flight,
)
from lightning_4d.parallel.pipeline.split import check_count
from lightning_4d.parallel.recompute import RecomputePolicy, StageRuns, install
from lightning_4d.parallel.tensor import TensorOptions, TensorParallel, divide
from lightning_4d.rehearsal.costs import split_by_cost
from lightning_4d.strategies.crossings import Crossings
from lightning_4d.strategies.fake_step import record_step
from lightning_4d.strategies.pipeline_split import plan_stages
from lightning_4d.strategies.pipeline_steps import _Shared as SharedParameters
from lightning_4d.strategies.precision import autocast_dtype

__all__ = ["Placed", "RehearsalOptions", "Stages", "flying", "place"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RehearsalOptions:
    """How the rank is set up: the arguments of ``NDStrategy`` of the same names, and what the Trainer is told.

    Args:
        recompute: the policy of activation checkpointing.
        precision: the Trainer's.
        gpus_per_node: ranks of a node, which "auto" sizes go by.
    """

    blocks: str | Sequence[str] = "auto"
    pipeline_schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    pipeline_split: Sequence[str | int] | Literal["auto"] = "auto"
    tensor_parallel_plan: Mapping[str, str] | Literal["auto"] = "auto"
    sequence_parallel: bool = False
    context_parallel_attention: str = "ring"
    ulysses_size: int | Literal["auto"] = "auto"
    reshard_after_forward: bool | Literal["auto"] = "auto"
    recompute: RecomputePolicy = field(default_factory=lambda: RecomputePolicy("none"))
    precision: str = "bf16-mixed"
    gpus_per_node: int = 8


@dataclass
class Stages:
    """The pipeline stages of the rank.

    Attributes:
        plan: which stage holds which blocks.
        parameter_stages: the stages that need each parameter, by name.
        pieces: the microbatches of a step.
        records: of the step on each of them.
        pipeline: runs them; None before the module is sharded.
        shared: parameters that other pipeline ranks need too.
    """

    plan: StagePlan
    parameter_stages: dict[str, frozenset[int]]
    pieces: list[Any]
    records: list[StepRecord]
    pipeline: Pipeline | None = None
    shared: tuple[SharedParameters, ...] = ()


@dataclass
class Placed:
    """A module set up on one rank.

    Attributes:
        module: with the rank's own parameters.
        data: its shards.
        blocks: its repeated layers, those of other stages too.
        tensor: what divides its layers, if anything does.
        context: what divides its sequences, if anything does.
        stages: its pipeline stages, if there are several.
    """

    module: LightningModule
    data: DataParallel
    blocks: list[Block]
    tensor: TensorParallel | None
    context: ContextParallel | None
    stages: Stages | None

    def in_parts(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, on divided layers and sequences."""
        context, tensor = self.context, self.tensor
        divided = step if context is None else lambda *args: context.run(step, *args)
        return divided if tensor is None else tensor.step(divided)

    def backward(self) -> AbstractContextManager[Any]:
        """A context for backward, in which checkpointed code runs again."""
        return nullcontext() if self.tensor is None else self.tensor.backward()

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of which this rank holds at least a part."""
        return {name: p for name, p in self.module.named_parameters() if not is_absent(p)}


def place(trainer: Trainer, module: LightningModule, batch: Any, mesh: Mesh, options: RehearsalOptions) -> Placed:
    """Set the module up for the rank and the layout of ``mesh``, in the order of ``NDStrategy``.

    Args:
        trainer: whose precision applies.
        module: whole, on fake tensors.
        batch: of a data-parallel rank; its values do not count.
        mesh: of the rank.
        options: see `RehearsalOptions`.

    Raises:
        UnsupportedError: what the strategies refuse at set-up.
    """
    _convert(module, trainer.precision_plugin.precision)
    blocks = find_blocks(module, options.blocks)
    context = _context(module, blocks, mesh, options)
    stages = _stages(trainer, module, blocks, batch, mesh, options)
    released = None if stages is None else _released(module, stages, mesh)
    tensor_options = TensorOptions(options.tensor_parallel_plan, options.sequence_parallel)
    tensor = divide(module, blocks, mesh, tensor_options)
    distribute = None if tensor is None else tensor.distribute
    reshard = options.reshard_after_forward if stages is None else options.reshard_after_forward is True
    data_options = DataParallelOptions(reshard_after_forward=reshard)
    boundaries = None if tensor is None or mesh.parameter_size == 1 else tensor.boundaries()
    if boundaries is not None:
        boundaries.install_inside()
    data = shard(module, blocks, mesh, _CPU, data_options, MetaInitialization(), released, distribute)
    if boundaries is not None:
        boundaries.install_outside()
    if context is not None:
        context.install_outside()
    data.gather_in(autocast_dtype(trainer.precision_plugin) if stages is None else None)
    if stages is not None:
        kind, group = find_schedule(options.pipeline_schedule), mesh["pp"].get_group()
        surroundings = trainer.precision_plugin.train_step_context
        stages.pipeline = Pipeline(
            module,
            stages.plan,
            stages.parameter_stages,
            group,
            _CPU,
            kind,
            surroundings,
            Crossings(context, tensor),
        )
        stages.pipeline.whole_backward = options.recompute.kind != "none"
        stages.shared = tuple(_shared(module, stages, mesh))
    if options.recompute.kind != "none":
        install(module, options.recompute, options.blocks, None if stages is None else _runs(stages, mesh))
    return Placed(module, data, blocks, tensor, context, stages)


def _convert(module: nn.Module, precision: str) -> None:
    """As ``module.to(dtype)`` of a precision like "bf16-true", which cannot swap fake tensors that something knows."""
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(str(precision))
    if dtype is None:
        return
    known: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if parameter not in known:
                    known[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                part._parameters[name] = known[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def flying(stages: Stages, mesh: Mesh) -> int:
    """Return how many microbatches of the rank's stages hold activations at once, at most."""
    ranks, count = mesh.layout.pipeline_parallel_size, len(stages.pieces)
    assert stages.pipeline is not None
    kind = for_microbatches(stages.pipeline.kind, count, ranks)
    return in_flight(action_list(kind, ranks, stages.plan.stages, count)[mesh.coordinate["pp"]])


def _runs(stages: Stages, mesh: Mesh) -> StageRuns:
    """What checkpointing has to know of the rank's stages."""
    plan = stages.plan
    runs = [[plan.order[block] for block in plan.blocks(stage)] for stage in plan.on_rank(mesh.coordinate["pp"])]
    return StageRuns(runs, flying(stages, mesh))


def _context(
    module: nn.Module, blocks: Sequence[Block], mesh: Mesh, options: RehearsalOptions
) -> ContextParallel | None:
    size = mesh.layout.context_parallel_size
    if size == 1:
        return None
    attention, ulysses = options.context_parallel_attention, options.ulysses_size
    # Groups of other ranks are made by all ranks of a real job; here there is one.
    own = [mesh.layout.group_ranks("cp", mesh.rank)]
    groups = make_groups(own, ulysses_size_of(attention, ulysses, size, options.gpus_per_node))
    context = ContextParallel(module, blocks, groups)
    context.install_inside()
    return context


def _stages(
    trainer: Trainer,
    module: LightningModule,
    blocks: Sequence[Block],
    batch: Any,
    mesh: Mesh,
    options: RehearsalOptions,
) -> Stages | None:
    ranks = mesh.layout.pipeline_parallel_size
    if ranks == 1:
        return None
    check_count(len(blocks), ranks)
    kind = find_schedule(options.pipeline_schedule)
    pieces = _pieces(batch, ranks, options)
    known: dict[Any, StepRecord] = {}
    for piece in pieces:
        if signature(piece) not in known:
            known[signature(piece)] = record_step(trainer, module, "training_step", piece, blocks, 0)
    records = [known[signature(piece)] for piece in pieces]
    plan = plan_stages(
        records[0],
        kind,
        ranks,
        options.pipeline_split,
        lambda stages: split_by_cost(trainer, module, pieces[0], records[0], stages),
    )
    needed = plan.parameter_stages(records[0], [name for name, _ in module.named_parameters()])
    return Stages(plan, needed, pieces, records)


def _pieces(batch: Any, ranks: int, options: RehearsalOptions) -> list[Any]:
    kind, rows = find_schedule(options.pipeline_schedule), rows_of(batch)
    if rows is None:
        return [batch]
    if options.num_microbatches == "auto":
        count = choose_microbatches(kind, rows, ranks)
    else:
        check_microbatches(kind, options.num_microbatches, ranks)
        count = min(options.num_microbatches, rows)
    return [cut(batch, rows, start, stop) for start, stop in bounds(rows, count)]


def _released(module: nn.Module, stages: Stages, mesh: Mesh) -> Released:
    here = set(stages.plan.on_rank(mesh.coordinate["pp"]))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owned = {
        (id(child), attribute)
        for child in module.modules()
        for attribute, parameter in child._parameters.items()
        if parameter is not None and stages.parameter_stages[names[id(parameter)]] & here
    }
    return Released(lambda child, attribute: (id(child), attribute) not in owned, _CPU)


def _shared(module: nn.Module, stages: Stages, mesh: Mesh) -> list[SharedParameters]:
    """The parameters that this rank and others of its pipeline need, by those ranks."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, needed in stages.parameter_stages.items():
        ranks = tuple(sorted({stages.plan.ranks[stage] for stage in needed}))
        if len(ranks) > 1 and mesh.coordinate["pp"] in ranks:
            by_ranks.setdefault(ranks, []).append(name)
    pipeline = mesh.layout.group_ranks("pp", mesh.rank)
    shared = []
    for ranks, names in by_ranks.items():
        members = [pipeline[rank] for rank in ranks]
        group = cast("dist.ProcessGroup", dist.new_group(members))
        shared.append(SharedParameters(module, names, group, members[0], is_first=mesh.coordinate["pp"] == ranks[0]))
    return shared
