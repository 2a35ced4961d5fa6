"""Run a user's step as a pipeline: one rank's stages, driven by one of torch's schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_4d import _torch_private as private
from lightning_4d.parallel.pipeline.clock import Clock
from lightning_4d.parallel.pipeline.crossing import Crossing, Whole
from lightning_4d.parallel.pipeline.flow import Output
from lightning_4d.parallel.pipeline.passes import StagePass, StepCalls, Trace
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.record import StepRecord, TensorSpec
from lightning_4d.parallel.pipeline.schedule import ScheduleKind, build_schedule, for_microbatches
from lightning_4d.parallel.pipeline.stage import Boundary, Stage

_RECORDS_KEPT = 256


class Observer(Protocol):
    """What becomes of a step's microbatches on the last stage."""

    def trace(self, microbatch: int, *, is_last: bool) -> Trace | None:
        """Begin a microbatch on a stage; return what follows the user's code on the last one, or None."""
        ...

    def finished(self, microbatch: int, result: Any) -> Tensor | None:
        """Take the step's result; return what the backward starts from, its seed multiplied in."""
        ...


class Pipeline:
    """The stages of this rank, and how to run steps through all of them.

    Args:
        root: the module, with the parameters of this rank's stages.
        plan: the division into stages; equal on all ranks.
        parameter_stages: the stages that need each parameter, by first name.
        group: the process group of the pipeline ranks.
        device: of this rank's tensors.
        kind: the schedule.
        surroundings: entered around each run of a piece of the step (autocast).
        crossing: what is sent of tensors that other axes divide.

    Which ranks must call: all ranks of the group, every method together.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: StagePlan,
        parameter_stages: Mapping[str, frozenset[int]],
        group: dist.ProcessGroup,
        device: torch.device,
        kind: ScheduleKind,
        surroundings: Callable[[], AbstractContextManager[Any]],
        crossing: Crossing | None = None,
    ) -> None:
        self.root, self.plan, self.kind, self.group, self.device = root, plan, kind, group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.here = plan.on_rank(self.rank)
        self.surroundings = surroundings
        self.crossing: Crossing = crossing or Whole()
        self.parameter_stages = parameter_stages
        self.calls = StepCalls(root, plan, self.here)
        self.whole_backward = False  # zero-bubble schedules compute both halves of a backward together
        self.clock: Clock | None = None  # measures the next steps, where one is wanted
        self._owners = _owners(root)
        self.calls.guard(self._partly_held())
        self._stages: dict[tuple[bool, ...], list[Stage]] = {}
        self._schedules: dict[tuple[str, int, int], Any] = {}
        self._dead: dict[int, frozenset[str]] = {}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self._running: _Step | None = None
        self._carried: dict[int, tuple[StepRecord, list[tuple[Output, ...]]]] = {}

    def _partly_held(self) -> list[str]:
        """Modules outside the blocks with parameters that not every pipeline rank holds."""
        everywhere = set(self.plan.ranks)
        return sorted(
            {
                name.rpartition(".")[0]
                for name, stages in self.parameter_stages.items()
                if "." in name
                and not any(name.startswith(block + ".") for block in self.plan.order)
                and {self.plan.ranks[stage] for stage in stages} != everywhere
            }
        )

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return self.plan.ranks[-1]

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.rank == self.last_rank

    def run(
        self,
        step: Callable[[Any], Any],
        pieces: Sequence[Any],
        records: Sequence[StepRecord],
        observer: Observer,
        key: tuple[object, ...],
        *,
        backward: bool,
    ) -> None:
        """Run ``step`` on each microbatch through all stages, with its backward if asked.

        Gradients are left on the parameters that autograd sees.

        Args:
            step: the user's; takes a microbatch.
            pieces: the microbatches; equal on all pipeline ranks.
            records: of the step at the shapes of each.
            observer: gets results on the last stage.
            key: of the step's random numbers; equal on all pipeline ranks.
            backward: run the backward too.
        """
        count = len(pieces)
        kind = for_microbatches(self.kind, count, self.ranks)
        stages = self._stages_for(records, split=kind.splits_backward)
        schedule = self._schedule(kind, stages, count)
        carried = [self._carried_in(record) for record in records]
        self._running = _Step(step, pieces, records, carried, observer, key)
        self._stand_in_for(records)
        for stage in stages:
            stage.clock = self.clock
            stage.begin(self._boundaries(stage.index, records, carried), backward=backward)
        self.calls.in_step = True
        try:
            private.run_schedule(schedule, count, backward=backward)
        finally:
            self._running, self.calls.in_step = None, False
        for stage in stages:
            assert stage.is_done(), f"stage {stage.index} was left in the middle of a step"

    def run_tail(
        self,
        step: Callable[[Any], Any],
        piece: Any,
        record: StepRecord,
        hidden: Mapping[Output, Tensor],
        trace: Trace,
        key: tuple[object, ...],
    ) -> Any:
        """Run ``step`` with given values in place of what the blocks return, and return its result.

        Which ranks must call: that of the last stage; there is no communication.
        """
        self._stand_in_for([record])
        blocks = len(self.plan.order)
        dead = self._dead[self.plan.stages - 1]
        given = {output: self.crossing.divide(t, _spec(record, output), record.hidden) for output, t in hidden.items()}
        one = StagePass(self.calls, self.plan, range(blocks, blocks), record, given, (), dead, self.device, key, trace)
        with torch.enable_grad(), self.surroundings():
            return one.run(lambda: step(piece))

    @property
    def most_in_flight(self) -> dict[int, int]:
        """By stage of this rank: how many microbatches' activations were held at once in the last step."""
        return {s.index: s.most_in_flight for stages in self._stages.values() for s in stages if s.most_in_flight}

    # ------------------------------------------------------------------------------------------------------ the stages

    def _stages_for(self, records: Sequence[StepRecord], *, split: bool) -> list[Stage]:
        """This rank's stages. A backward that torch cannot split (a parameter used twice) is run in one."""
        key = tuple(
            split and not self.whole_backward and not records[0].uses_twice(self.plan.blocks(index))
            for index in self.here
        )
        if key not in self._stages:
            self._stages[key] = [
                Stage(
                    index,
                    self.plan.ranks,
                    self.group,
                    self.device,
                    self._forward,
                    functools.partial(self.weights, index),
                    splits_backward=splits,
                )
                for index, splits in zip(self.here, key, strict=True)
            ]
        return self._stages[key]

    def _schedule(self, kind: ScheduleKind, stages: list[Stage], count: int) -> Any:
        key = (kind.name, count, id(stages))
        if key not in self._schedules:
            self._schedules[key] = build_schedule(kind, stages, count)
        return self._schedules[key]

    def weights(self, stage: int) -> list[Tensor]:
        """Return the parameters that autograd sees on a stage, gathered ones where they are gathered."""
        if stage not in self._places:  # asked for each microbatch, and to walk over modules takes milliseconds
            self._places[stage] = self._places_of(stage)
        places = self._places[stage]
        found = dict.fromkeys(module._parameters.get(name) for module, name in places)  # not [name]: as steps see them
        return [parameter for parameter in found if parameter is not None and parameter.requires_grad]

    def _places_of(self, stage: int) -> list[tuple[nn.Module, str]]:
        """The modules and attributes that hold the parameters of a stage."""
        blocks = [self.root.get_submodule(self.plan.order[b]) for b in self.plan.blocks(stage)]
        inside = [(module, name) for block in blocks for module in block.modules() for name in module._parameters]
        return inside + [self._owners[name] for name, stages in self.parameter_stages.items() if stage in stages]

    def _carried_in(self, record: StepRecord) -> list[tuple[Output, ...]]:
        """What crosses each cut; found once for a record."""
        known = self._carried.get(id(record))
        if known is None or known[0] is not record:
            if len(self._carried) >= _RECORDS_KEPT:
                self._carried.clear()
            known = self._carried[id(record)] = (record, self.plan.carried(record))
        return known[1]

    def _boundaries(
        self, stage: int, records: Sequence[StepRecord], carried: Sequence[Sequence[Sequence[Output]]]
    ) -> list[Boundary]:
        def specs(record: StepRecord, outputs: Iterable[Output]) -> tuple[TensorSpec, ...]:
            return tuple(self.crossing.sent(_spec(record, output), record.hidden) for output in outputs)

        return [
            Boundary(
                specs(record, cuts[stage - 1]) if stage > 0 else (),
                specs(record, cuts[stage]) if stage < self.plan.stages - 1 else (),
            )
            for record, cuts in zip(records, carried, strict=True)
        ]

    def _stand_in_for(self, records: Sequence[StepRecord]) -> None:
        names = records[0].stubs
        for stage in self.here:
            if stage not in self._dead:
                self._dead[stage] = frozenset(name for name in names if self._is_dead(name, stage))
        self.calls.add_stubs([name for stage in self.here for name in self._dead[stage]])

    def _is_dead(self, module: str, stage: int) -> bool:
        """Whether nothing on ``stage`` needs the parameters that a module outside the blocks holds itself."""
        owned = [name for name, (owner, _) in self._owners.items() if owner is self.root.get_submodule(module)]
        tied = [self._first_name(module, name) for name in self.root.get_submodule(module)._parameters]
        names = set(owned) | {name for name in tied if name is not None}
        return bool(names) and all(stage not in self.parameter_stages[name] for name in names)

    def _first_name(self, module: str, attribute: str) -> str | None:
        parameter = self.root.get_submodule(module)._parameters.get(attribute)
        return next(
            (
                n
                for n, (owner, own) in self._owners.items()
                if parameter is not None and owner._parameters.get(own) is parameter
            ),
            None,
        )

    # ----------------------------------------------------------------------------------------------------- microbatches

    def _forward(self, stage: Stage, microbatch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        running = self._running
        assert running is not None
        record, cuts = running.records[microbatch], running.carried[microbatch]
        one = StagePass(
            self.calls,
            self.plan,
            self.plan.blocks(stage.index),
            record,
            {} if stage.is_first else self._unpacked(record, cuts[stage.index - 1], inputs),
            () if stage.is_last else cuts[stage.index],
            self._dead[stage.index],
            self.device,
            (*running.key, microbatch),
            running.observer.trace(microbatch, is_last=stage.is_last),
        )
        with torch.set_grad_enabled(stage.has_backward), self.surroundings():
            result = one.run(lambda: running.step(running.pieces[microbatch]))
        if not stage.is_last:
            return one.outputs(self.crossing)
        root = running.observer.finished(microbatch, result)
        return [] if root is None else [root]

    def _unpacked(
        self, record: StepRecord, outputs: Sequence[Output], tensors: Sequence[Tensor]
    ) -> dict[Output, Tensor]:
        return {
            output: self.crossing.unpack(tensor, _spec(record, output), record.hidden)
            for output, tensor in zip(outputs, tensors, strict=True)
        }


def _spec(record: StepRecord, output: Output) -> TensorSpec:
    return record.blocks[output.block].slots()[output.slot].spec


class _Step:
    """What one run of the schedule is about."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        pieces: Sequence[Any],
        records: Sequence[StepRecord],
        carried: Sequence[Sequence[tuple[Output, ...]]],
        observer: Observer,
        key: tuple[object, ...],
    ) -> None:
        self.step, self.pieces, self.records = step, pieces, records
        self.carried, self.observer, self.key = carried, observer, key


def _owners(root: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and attribute of each parameter by its first name, since parameters are replaced."""
    owners = {}
    for name, _ in root.named_parameters():
        module, _, attribute = name.rpartition(".")
        owners[name] = (root.get_submodule(module), attribute)
    return owners
