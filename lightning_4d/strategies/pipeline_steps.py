"""Translate between Lightning's steps and :mod:`lightning_4d.parallel.pipeline`, for one strategy.

Set-up in two parts: :meth:`PipelineSteps.plan` before the module is sharded decides which rank holds what, and
:meth:`PipelineSteps.attach` after it makes the stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_4d.absent import Released, is_absent
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.mesh import made_once
from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.gradients import Elsewhere, count_stages
from lightning_4d.parallel.pipeline.announce import Announcement
from lightning_4d.parallel.pipeline.batch import bounds, cut, rows_of, without_rows
from lightning_4d.parallel.pipeline.engine import Pipeline
from lightning_4d.parallel.pipeline.handover import (
    Gradients,
    give_gradients,
    loss_with_backward,
    scale_gradients,
    take_gradients,
)
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.randomness import kept
from lightning_4d.parallel.pipeline.record import StepRecord
from lightning_4d.parallel.pipeline.reduction import Plan
from lightning_4d.parallel.pipeline.schedule import (
    ScheduleKind,
    action_list,
    check_microbatches,
    choose_microbatches,
    find_schedule,
    for_microbatches,
    in_flight,
    stage_ranks,
)
from lightning_4d.parallel.pipeline.split import check_count
from lightning_4d.parallel.recompute import StageRuns
from lightning_4d.parallel.recompute.install import installed
from lightning_4d.strategies.example_batch import example_batch
from lightning_4d.strategies.loss_probe import LossProbe
from lightning_4d.strategies.pipeline_metrics import StageMetrics
from lightning_4d.strategies.pipeline_results import EvaluationResults, TrainingResults
from lightning_4d.strategies.pipeline_split import split_by_cost, split_by_name
from lightning_4d.strategies.stale_gradients import without_stale
from lightning_4d.strategies.step_log import replay, set_caches
from lightning_4d.strategies.step_records import StepRecords

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy


_RECORDS_KEPT = 256
_MADE = "_lightning_4d_pipeline"  # the attribute of a module that holds what was made of it


@dataclass(frozen=True)
class PipelineOptions:
    """What a user says about pipelining; see :class:`lightning_4d.NDStrategy`."""

    schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    split: Sequence[str | int] | Literal["auto"] = "auto"
    loss_reduction: Literal["auto", "mean", "sum"] = "auto"

    def kind(self) -> ScheduleKind:
        """Return the schedule."""
        return find_schedule(self.schedule)


class PipelineSteps:
    """Runs the steps of one strategy's module through the stages of its pipeline ranks.

    Args:
        strategy: whose module, mesh and precision these are.
        options: the user's.
    """

    def __init__(self, strategy: NDStrategy, options: PipelineOptions) -> None:
        self._training_news: Announcement
        self._evaluation_news: Announcement
        self.metrics: StageMetrics
        self._names: set[str] = set()
        self._tail_modules: frozenset[str] = frozenset()
        self._sizes: list[int] = []
        self.whole: frozenset[tuple[Any, ...]] = frozenset()  # entries of a batch without a batch dimension
        self._strategy = strategy
        self._options = options
        self._kind = options.kind()
        self._plan: StagePlan | None = None
        self._parameter_stages: dict[str, frozenset[int]] = {}
        self._pipeline: Pipeline | None = None
        self._records = StepRecords(strategy)
        self._shared: list[_Shared] = []
        self.pipeline_layout: ParallelLayout | None = None  # that the stages were made for
        self.losses = Plan()
        self._steps = 0
        self._checked: dict[tuple[int, bool], StepRecord] = {}
        self._proven = False  # once for each run, and again where the step takes another course

    @property
    def pipeline(self) -> Pipeline:
        """The stages of this rank, from set-up on."""
        assert self._pipeline is not None
        return self._pipeline

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self._kind.name

    @property
    def module(self) -> LightningModule:
        """The user's."""
        return self._strategy._module

    @property
    def loss_reduction(self) -> Literal["auto", "mean", "sum"]:
        """The user's word on how losses combine."""
        return self._options.loss_reduction

    def record(self, name: str, batch: Any, arguments: tuple[Any, ...]) -> StepRecord:
        """Return the record of a step on a batch of these shapes."""
        return self._records.get(name, batch, arguments)

    def in_parts(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` with sequences and layers divided inside, and its result whole."""
        return self._strategy.model_ranks.in_parts(step)

    @property
    def stage_plan(self) -> StagePlan:
        """The division into stages, from set-up on."""
        assert self._plan is not None
        return self._plan

    # --------------------------------------------------------------------------------------------------------- set-up

    def plan(self, trainer: Trainer, module: LightningModule, blocks: Sequence[Block]) -> None:
        """Decide which rank holds what, from one batch and the module as it is. Which ranks must call: all.

        Raises:
            UnsupportedError: the step cannot run in stages.
        """
        if self.reuse(trainer, module):
            return
        ranks = self._strategy.layout.pipeline_parallel_size
        check_count(len(blocks), ranks)
        if isinstance(self._options.num_microbatches, int):
            check_microbatches(self._kind, self._options.num_microbatches, ranks)
        batch, smaller = example_batch(trainer)
        self.whole = without_rows(batch, smaller)
        name = _STEP[trainer.state.fn]  # pyright: ignore[reportArgumentType]
        self._records.begin(module, blocks)
        pieces = self._pieces(batch) if name == "training_step" else [batch]
        arguments = _arguments(getattr(module, name))
        record = self._records.get(name, pieces[0], arguments)
        starts = self._starts(trainer, module, pieces[0], record)
        plan = StagePlan(record.order, tuple(starts), tuple(stage_ranks(self._kind, ranks, len(starts))))
        names = [name for name, _ in module.named_parameters()]
        decided = self._strategy.broadcast((plan, plan.parameter_stages(record, names)))
        self._plan, self._parameter_stages = decided
        self._names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        last = self._plan.stages - 1
        self._tail_modules = frozenset(
            name.rpartition(".")[0] for name, stages in self._parameter_stages.items() if stages == {last}
        )
        self._check(record, name, len(pieces))

    def reuse(self, trainer: Trainer, module: LightningModule) -> bool:
        """Take over what an earlier Trainer made of this module, if one did. Which ranks must call: all.

        Raises:
            UnsupportedError: for another layout or schedule.
        """
        made: PipelineSteps | None = vars(module).get(_MADE)
        if made is None:
            return False
        here, there = self._strategy.layout, made.pipeline_layout
        if here != there or self._kind != made._kind:
            raise UnsupportedError(
                explain(
                    f"a module in pipeline stages for {there} and {made._kind.name!r}, in a Trainer with {here} and "
                    f"{self._kind.name!r}",
                    "a module keeps its stages for the life of the process",
                    "save a checkpoint and load it into a new module, or keep layout and schedule",
                )
            )
        for name in (
            "_plan",
            "_parameter_stages",
            "_names",
            "_tail_modules",
            "_pipeline",
            "metrics",
            "_shared",
        ):
            setattr(self, name, getattr(made, name))
        self._training_news, self._evaluation_news = made._training_news, made._evaluation_news
        self.losses = made.losses
        self._records.begin(module, made._records.blocks)
        if trainer.state.fn == TrainerFn.FITTING:  # only training cuts batches, and this run's are other ones
            self.whole = without_rows(*example_batch(trainer))
        return True

    def _starts(self, trainer: Trainer, module: LightningModule, piece: Any, record: StepRecord) -> list[int]:
        ranks = self._strategy.layout.pipeline_parallel_size
        if self._options.split != "auto":
            return split_by_name(self._options.split, record.order, self._kind, ranks)
        stages = ranks * self._kind.default_stages_per_rank
        check_count(len(record.order), stages)
        return split_by_cost(trainer, module, piece, record, stages)

    def released(self, module: LightningModule) -> Released:
        """Return what lets go of the parameters that only other ranks need; nothing where that has been done."""
        assert self._plan is not None
        here = set(self._plan.on_rank(self._rank))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        owned = {
            (id(child), attribute)
            for child in module.modules()
            for attribute, parameter in child._parameters.items()
            if parameter is not None and (is_absent(parameter) or self._parameter_stages[names[id(parameter)]] & here)
        }
        return Released(lambda child, attribute: (id(child), attribute) not in owned, self._strategy.root_device)

    @property
    def _rank(self) -> int:
        return self._strategy.mesh.coordinate["pp"]

    def attach(self, module: LightningModule) -> None:
        """Make the stages of the sharded module. Which ranks must call: all."""
        strategy = self._strategy
        assert self._plan is not None
        if self._pipeline is not None:
            return
        self.pipeline_layout = strategy.layout
        object.__setattr__(module, _MADE, self)
        group = strategy.mesh["pp"].get_group()
        self._pipeline = Pipeline(
            module,
            self._plan,
            self._parameter_stages,
            group,
            strategy.root_device,
            self._kind,
            nullcontext,
            strategy.crossings(),
        )
        self._training_news = Announcement(group, self._pipeline.last_rank, strategy.root_device)
        self._evaluation_news = Announcement(group, self._pipeline.last_rank, strategy.root_device)
        self.metrics = StageMetrics(module, group, self._pipeline.last_rank, strategy.root_device)
        self._shared = self._share(module)
        for shared in self._shared:
            shared.make_equal()
        count_stages(module, lambda: Elsewhere(group, self.counted_elsewhere()))

    def _share(self, module: LightningModule) -> list[_Shared]:
        """Group the parameters that stages on several ranks need by those ranks."""
        assert self._plan is not None
        layout = self._strategy.layout
        pipelines = sorted({tuple(layout.group_ranks("pp", rank)) for rank in range(layout.world_size)})
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self._parameter_stages.items():
            ranks = tuple(sorted({self._plan.ranks[stage] for stage in stages}))
            if len(ranks) > 1:
                by_ranks.setdefault(ranks, []).append(name)
        shared = []
        for ranks, names in by_ranks.items():
            for pipeline in pipelines:
                members = [pipeline[rank] for rank in ranks]
                key = ("shared parameters", tuple(members))
                group = made_once(key, partial(_new_group, members))  # on all ranks: names count
                if self._strategy.global_rank in members:
                    shared.append(_Shared(module, names, group, members[0], is_first=self._rank == ranks[0]))
        return shared

    def saved_elsewhere(self, module: LightningModule) -> set[str]:
        """Return the names of the state dict that another rank saves: what it holds, or counts, or what it changes."""
        counted = {id(p) for shared in self._shared if not shared.is_first for p in shared.parameters()}
        named = module.named_parameters(remove_duplicate=False)
        parameters = {name for name, p in named if is_absent(p) or id(p) in counted}
        assert self._plan is not None
        plan, tail = self._plan, self._tail_modules
        buffers = {
            name
            for name in module.state_dict()
            if name not in self._names and self._buffer_rank(name, plan, tail) != self._rank
        }
        return parameters | buffers

    def _buffer_rank(self, name: str, plan: StagePlan, tail: frozenset[str]) -> int:
        """The rank that may change a buffer: its block's, the last for the tail's modules, else the first."""
        for number, block in enumerate(plan.order):
            if name.startswith(block + "."):
                return plan.ranks[plan.stage_of(number)]
        return plan.ranks[-1] if name.rpartition(".")[0] in tail else plan.ranks[0]

    def stage_runs(self) -> StageRuns:
        """Return this rank's blocks by stage, and how many microbatches wait for their backward at once."""
        plan = self.stage_plan
        ranks = self._strategy.layout.pipeline_parallel_size
        count = self._options.num_microbatches
        microbatches = count if isinstance(count, int) else max(len(self._sizes), 1)
        kind = for_microbatches(self._kind, microbatches, ranks)
        flying = in_flight(action_list(kind, ranks, plan.stages, microbatches)[self._rank])
        return StageRuns([[plan.order[b] for b in plan.blocks(stage)] for stage in plan.on_rank(self._rank)], flying)

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Return the parameters here that a norm over all stages counts on another rank."""
        return {parameter for shared in self._shared if not shared.is_first for parameter in shared.parameters()}

    # -------------------------------------------------------------------------------------------------------- training

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        """Run Lightning's training step: forward and backward of all microbatches.

        Returns:
            The batch's loss, or a dict with it, whose backward hands the gradients over. Equal on all pipeline ranks.

        Which ranks must call: all.
        """
        return self._strategy.data.run_training_step(self._train, batch, *arguments)

    def _train(self, batch: Any, *arguments: Any) -> Any:
        strategy, module, pipeline = self._strategy, self._strategy._module, self.pipeline
        strategy.model_ranks.check("training_step", batch)
        pieces = self._pieces(batch)
        records = self._records.get_all("training_step", pieces, arguments)
        for record in records[:1]:
            self._check(record, "training_step", len(pieces))
        scale = self._loss_scale()
        pipeline.surroundings = self.metrics.surroundings = strategy.precision_plugin.train_step_context
        prove = LossProbe(self, batch, arguments, max(self._sizes))
        if len(pieces) > 1 and not self._proven:
            prove.together()
            self._proven = True
        results = TrainingResults(
            module,
            pieces,
            self._sizes,
            self._options.loss_reduction,
            scale,
            self.losses,
            self.metrics,
            prove,
            whole=self.whole,
            checks=self._is_checked(),
        )
        data = strategy.data
        # Checkpointing would recompute once for each parameter whose gradient comes later.
        pipeline.whole_backward = installed(module) is not None
        earlier = without_stale(take_gradients(data.gradient_leaves()), module.trainer)
        data.begin_schedule()
        key = self._key("train", arguments)
        step = strategy.model_ranks.in_parts(module.training_step)
        with results.keeping_log(), kept(pipeline.device), strategy.model_ranks.backward():
            pipeline.run(lambda piece: step(piece, *arguments), pieces, records, results, key, backward=True)
        made = take_gradients(data.gradient_leaves())
        give_gradients(earlier)
        description, numbers = self._training_news.exchange(*(results.news() if pipeline.is_last else (None, ())))
        loss, correction, *logged = numbers
        self._replay(description, logged)
        besides: dict[str, Any] = {}
        if description["has_effects"]:
            effects = self._from_last(results.effects)
            effects.apply(module)
            besides = effects.returned
        loss = loss_with_backward(
            loss.to(description["dtype"]), lambda gradient: self._deliver(made, gradient, correction, scale)
        )
        return {"loss": loss, **besides} if description["is_dict"] else loss

    def _is_checked(self) -> bool:
        """Whether this step checks what would wait for a device: the first steps, then now and then."""
        self._steps += 1
        return self._steps <= 3 or self._steps % 100 == 0

    def _deliver(self, made: Gradients, gradient: Tensor, correction: Tensor, scale: Tensor | None) -> None:
        """Add the schedule's gradients to the parameters', in the backward of the loss."""
        factor = gradient * correction.to(gradient.dtype)
        scale_gradients(made, factor if scale is None else factor / scale)
        for shared in self._shared:
            shared.sum_gradients(made)
        give_gradients(made)
        self._strategy.data.end_schedule()

    def _loss_scale(self) -> Tensor | None:
        scaler = getattr(self._strategy.precision_plugin, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return None
        return scaler.scale(torch.ones((), device=self._strategy.root_device))

    # ------------------------------------------------------------------------------------------------------ evaluation

    def evaluation_step(self, name: str, context: Callable[[], AbstractContextManager[Any]], *arguments: Any) -> Any:
        """Run one validation, test or prediction step, forward only, the whole batch at once.

        Returns:
            What the step returned on the last stage, on every pipeline rank.

        Which ranks must call: all.
        """
        batch, *rest = arguments
        module, pipeline = self._strategy._module, self.pipeline
        self._strategy.model_ranks.check(name, batch)
        record = self._records.get(name, batch, tuple(rest))
        self._check(record, name, 1)
        results = EvaluationResults(module, self.metrics)
        pipeline.surroundings = context
        step = self._strategy.model_ranks.in_parts(getattr(module, name))
        with results.keeping_log(), kept(pipeline.device):
            pipeline.run(
                lambda piece: step(piece, *rest),
                [batch],
                [record],
                results,
                self._key(name, tuple(rest)),
                backward=False,
            )
        description, numbers = self._evaluation_news.exchange(*(results.news() if pipeline.is_last else (None, ())))
        self._replay(description, numbers)
        if description["has_effects"]:
            self._from_last(results.effects).apply(module)
        if not description["has_result"]:
            return None
        return self._from_last(results.result)

    def _replay(self, description: dict[str, Any], numbers: Sequence[Tensor]) -> None:
        """Log on this rank what was logged on the last stage."""
        module, logged = self.module, description["logged"]
        set_caches(module, dict(zip(description["caches"], numbers[len(logged) :], strict=True)))
        values = dict(zip(logged, numbers, strict=False))
        replay(module, description["options"], _with_kinds(values, description))

    def _from_last(self, value: Any) -> Any:
        """Return the last stage's object on every pipeline rank, its tensors on this rank's device."""
        pipeline = self.pipeline
        box = [_moved(value, torch.device("cpu")) if pipeline.is_last else None]
        dist.broadcast_object_list(box, group=pipeline.group, group_src=pipeline.last_rank, device=pipeline.device)
        return value if pipeline.is_last else _moved(box[0], pipeline.device)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _pieces(self, batch: Any) -> list[Any]:
        rows = rows_of(batch, self.whole)
        wanted = self._options.num_microbatches
        if rows is None:
            if wanted not in ("auto", 1):
                raise UnsupportedError(
                    explain("a batch without tensors", "microbatches are rows of tensors", "use num_microbatches=1")
                )
            self._sizes = [1]
            return [batch]
        ranks = self._strategy.layout.pipeline_parallel_size
        count = choose_microbatches(self._kind, rows, ranks) if wanted == "auto" else min(wanted, rows)
        if count == 1:
            self._sizes = [rows]
            return [batch]
        edges = bounds(rows, count)
        self._sizes = [stop - start for start, stop in edges]
        return [cut(batch, rows, start, stop, self.whole) for start, stop in edges]

    def _check(self, record: StepRecord, name: str, count: int) -> None:
        """Refuse what cannot run in the stages there are; once for a record."""
        if self._checked.get((id(record), count > 1)) is record:
            return
        if len(self._checked) >= _RECORDS_KEPT:
            self._checked.clear()
        self._check_new(record, name, count)
        self._checked[id(record), count > 1] = record

    def _check_new(self, record: StepRecord, name: str, count: int) -> None:
        assert self._plan is not None
        self._plan.check_same_order(record, name)
        if count > 1 and record.written_buffers:
            raise UnsupportedError(
                explain(
                    f"{name} changes the buffer {record.written_buffers[0]!r} with {count} microbatches",
                    "each microbatch would change it, so statistics over a batch (batch normalisation in training, "
                    "counters) would not be those of the batch",
                    "use num_microbatches=1, put the layer into eval mode, or normalise otherwise",
                )
            )
        self._refuse_scattered_buffers(record, name)
        if count > 1 and self._options.loss_reduction == "auto":
            _refuse_scalars_of_blocks(record)
        for parameter, stages in self._plan.parameter_stages(record, list(self._parameter_stages)).items():
            missing = {s for s in stages if record.users(parameter)} - self._parameter_stages[parameter]
            if missing:
                raise UnsupportedError(
                    explain(
                        f"{name} needs the parameter {parameter!r} on pipeline stage {min(missing)}, where "
                        "the step that the stages were made for does not",
                        "a stage holds the parameters that this step needs there",
                        "use the parameter in the same place in all steps",
                    )
                )

    def _refuse_scattered_buffers(self, record: StepRecord, name: str) -> None:
        """Refuse buffers that code outside the blocks changes, unless they belong to a layer of one stage.

        That code runs on every stage, once for each: a counter would count stages, and ranks would save what they have.
        """
        for buffer in record.outside_buffers:
            owner = buffer.rpartition(".")[0]
            stages = [s for n, s in self._parameter_stages.items() if n.rpartition(".")[0] == owner != ""]
            if not stages or len(frozenset().union(*stages)) > 1:
                raise UnsupportedError(
                    explain(
                        f"{name} changes the buffer {buffer!r}, which is no layer's of one pipeline stage",
                        "code outside the blocks runs on every stage, so the buffer would change on each of them",
                        "change it in on_train_batch_end, or keep a plain attribute (self.count += 1)",
                    )
                )

    def _key(self, name: str, arguments: tuple[Any, ...]) -> tuple[object, ...]:
        trainer = self._strategy._module.trainer
        numbers = tuple(argument for argument in arguments if isinstance(argument, int))
        return (
            self._seed(),
            name,
            trainer.current_epoch,
            trainer.global_step,
            numbers,
            self._strategy.data_parallel_rank,
        )

    def _seed(self) -> int:
        return torch.initial_seed()


def _arguments(step: Callable[..., Any]) -> tuple[int, ...]:
    """Return what Lightning hands on besides a first batch: its index and its loader's, where the step needs them."""
    index = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
    loader = inspect.signature(step).parameters.get("dataloader_idx")
    return (*index, 0) if loader is not None and loader.default is inspect.Parameter.empty else index


def _refuse_scalars_of_blocks(record: StepRecord) -> None:
    """Refuse a loss with a part that blocks reduce themselves: a balance loss is no mean over samples."""
    for source in sorted(record.outputs_needed(None)):
        block = record.blocks[source.block]
        if block.slots()[source.slot].spec.shape == ():
            kept = next((a.attribute for a in block.attributes if a.slot.number == source.slot), None)
            what = f"in its attribute {kept!r}" if kept else "in its output"
            raise UnsupportedError(
                explain(
                    f"block {block.name!r} leaves a scalar {what}, and the code after the blocks uses it",
                    "how such a scalar of a batch follows from those of its microbatches is not known; a balance loss, "
                    "a product of means, does not follow from them",
                    "use num_microbatches=1, or loss_reduction='mean' if means of microbatches are what you want",
                )
            )


class _Shared:
    """Parameters that stages on several ranks need: equal everywhere, their gradients summed.

    Args:
        module: the sharded module.
        names: of the parameters.
        group: the process group of the ranks.
        source: the global rank whose values count.
        is_first: whether this rank counts them in norms and saves them.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], group: dist.ProcessGroup, source: int, *, is_first: bool
    ) -> None:
        self._places = [(module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]
        self._group = group
        self._source = source
        self.is_first = is_first

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters as the module holds them now."""
        found = [module._parameters.get(name) for module, name in self._places]  # by `get`: not what steps see
        return [parameter for parameter in found if parameter is not None]

    @torch.no_grad()
    def make_equal(self) -> None:
        """Take the first rank's values. Which ranks must call: all of the group."""
        for parameter in self.parameters():
            local = _local(parameter.detach())
            if local.numel():
                dist.broadcast(local, self._source, group=self._group)

    @torch.no_grad()
    def sum_gradients(self, made: Gradients) -> None:
        """Sum the gradients over the ranks. Which ranks must call: all of the group, in their backward."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            return
        for parameter in trained:
            if parameter not in made:
                made[parameter] = torch.zeros_like(parameter)
        for dtype in {made[p].dtype for p in trained}:
            gradients = [_local(made[p]) for p in trained if made[p].dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self._group)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))


def _new_group(members: list[int]) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.new_group(members))


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds: ranks of one pipeline hold the same part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_STEP = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def _with_kinds(values: dict[str, Tensor], description: dict[str, Any]) -> dict[str, Any]:
    """Turn what were plain numbers back into numbers; metrics have none."""
    numbers = description["numbers"]
    return {
        name: None if name not in values else values[name].item() if name in numbers else values[name]
        for name in description["options"]
    }


def _moved(value: Any, device: torch.device) -> Any:
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().to(device))
