"""Run the user's own step for one stage: blocks of other stages stand aside, and the run ends where the stage does.

All code outside the blocks runs on every stage until the first block of the next stage is entered; there the run
unwinds. A block of an earlier stage returns what was received of its output, and values that do not count (nan) for
what nothing on this stage needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_4d import _torch_private as private
from lightning_4d._torch_private import pytree
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.parallel.pipeline.crossing import Crossing
from lightning_4d.parallel.pipeline.flow import Output
from lightning_4d.parallel.pipeline.plan import StagePlan
from lightning_4d.parallel.pipeline.randomness import seed_of, seeded
from lightning_4d.parallel.pipeline.record import SameAsArgument, Slot, StepRecord, TensorSpec


class Trace(Protocol):
    """Follows what the user's code makes of the values of samples; see :mod:`.tail_trace`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def rows(self, *tensors: Any) -> None:
        """Say which tensors hold values of samples."""
        ...


class Unwind(BaseException):
    """Ends a run at the entry of the next stage's first block; no ``except Exception`` of the user's stops it."""


class StepCalls:
    """Stands between the user's step and the modules it calls, for the life of the module.

    Args:
        root: the module.
        plan: the division into stages.
        here: the stages of this rank.
    """

    def __init__(self, root: nn.Module, plan: StagePlan, here: Sequence[int]) -> None:
        self.running: StagePass | None = None
        self.in_step = False  # also during backwards, which may call modules again
        self._plan = plan
        self._partly_held: set[str] = set()
        self._here = set(here)
        self._modules = {name: root.get_submodule(name) for name in plan.order}
        self._stub_modules: dict[str, nn.Module] = {}
        self._root = root
        for number, name in enumerate(plan.order):
            self._replace(self._modules[name], self._block_call, number)

    def add_stubs(self, names: Sequence[str]) -> None:
        """Stand in for modules outside the blocks as well."""
        for name in names:
            if name not in self._stub_modules:
                self._stub_modules[name] = self._root.get_submodule(name)
                self._replace(self._stub_modules[name], self._stub_call, name)

    def guard(self, names: Sequence[str]) -> None:
        """Refuse calls outside steps of modules whose parameters some rank does not hold, on all ranks alike."""
        self._partly_held.update(names)
        self.add_stubs(names)

    def module(self, name: str) -> nn.Module:
        """Return a block by name."""
        return self._modules[name]

    def remove(self) -> None:
        """Let the modules run as before."""
        for module in (*self._modules.values(), *self._stub_modules.values()):
            private.restore_call(module)

    def _replace(self, module: nn.Module, call: Callable[..., Any], key: Any) -> None:
        original = private.replace_call(module, lambda *args, **kwargs: call(key, original, args, kwargs))

    def _block_call(self, number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.running is not None:
            return self.running.block(number, original, args, kwargs)
        if self.in_step and self._plan.stage_of(number) in self._here:
            return original(*args, **kwargs)
        stage = self._plan.stage_of(number)
        raise _outside_step(f"block {self._plan.order[number]!r}", f"it belongs to pipeline stage {stage}")

    def _stub_call(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.running is not None and self.running.stands_in_for(name):
            return self.running.stub(name)
        if self.running is None and not self.in_step and name in self._partly_held:
            raise _outside_step(f"the module {name!r}", "not all pipeline ranks hold its parameters")
        return original(*args, **kwargs)


def _outside_step(what: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"{what} was called outside training_step, validation_step, test_step and predict_step",
            f"{reason}, and only steps run on all stages together",
            "do it in predict_step or validation_step, or on a checkpoint loaded without pipelining",
        )
    )


class StagePass:
    """One microbatch on one stage.

    Args:
        calls: where the step's calls arrive.
        plan: the division into stages.
        own: numbers of the blocks that run; none: all of them stand aside.
        record: of this step at this microbatch's shapes.
        received: what earlier stages sent.
        sends: what later stages need of what this stage has.
        dead: modules outside the blocks that nothing on this stage needs, by name.
        device: of the stage's tensors.
        key: of this microbatch's random numbers; equal on all stages.
        trace: on during the user's own code, on the last stage; blocks run without it and tell it what they return.
    """

    def __init__(
        self,
        calls: StepCalls,
        plan: StagePlan,
        own: range,
        record: StepRecord,
        received: Mapping[Output, Tensor],
        sends: Sequence[Output],
        dead: frozenset[str],
        device: torch.device,
        key: tuple[object, ...],
        trace: Trace | None = None,
    ) -> None:
        self._calls, self._plan, self._record = calls, plan, record
        self._own = own
        self._received = received
        self._sends = sends
        self._dead = dead
        self._device = device
        self._key = key
        self._trace = trace
        self._next = 0  # the block that has to be called next
        self._stub_calls: dict[str, int] = {}
        self._sent: dict[Output, Tensor] = dict(received)

    def run(self, step: Callable[[], Any]) -> Any:
        """Run ``step`` as far as this stage goes; return its result on the last stage, else None.

        Raises:
            UnsupportedError: the step calls the blocks in another order than the record says.
        """
        self._calls.running = self
        result = None
        try:
            with self._random(None), self._trace or nullcontext():
                result = step()
        except Unwind as unwound:
            unwound.__traceback__ = None  # its frames hold activations
        finally:
            self._calls.running = None
        if self._next < self._own.stop:
            raise self._wrong_order("the step ended")
        return result

    def outputs(self, crossing: Crossing) -> list[Tensor]:
        """Return what the next stage receives, each contiguous and no view, so that it can be sent and detached."""
        return [_own_memory(self._packed(output, crossing)) for output in self._sends]

    def _packed(self, output: Output, crossing: Crossing) -> Tensor:
        block = self._record.blocks[output.block]
        spec = block.slots()[output.slot].spec
        return crossing.pack(_checked(self._sent[output], spec, block.name), spec, self._record.hidden)

    # --------------------------------------------------------------------------------------------------------- blocks

    def block(self, number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run, replace or unwind at a call of a block."""
        if number != self._next:
            raise self._wrong_order(f"block {self._plan.order[number]!r} was called")
        if number >= self._own.stop:
            raise Unwind
        self._next += 1
        if self._trace is None:
            return self._run_block(number, original, args, kwargs)
        self._trace.__exit__(None, None, None)
        try:
            output = self._run_block(number, original, args, kwargs)
            leaves = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
            self._trace.rows(*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *self._attributes(number))
        finally:
            self._trace.__enter__()
        return output

    def _attributes(self, number: int) -> list[Tensor]:
        """What a block, or its stand-in, has left in attributes."""
        record = self._record.blocks[number]
        if not record.attributes:
            return []
        module = self._calls.module(record.name)
        found = [getattr(module.get_submodule(kept.module), kept.attribute, None) for kept in record.attributes]
        return [tensor for tensor in found if isinstance(tensor, Tensor)]

    def _run_block(self, number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number < self._own.start:
            return self._stand_in(number, args, kwargs)
        with self._random(number):
            output = original(*args, **kwargs)
        self._keep(number, output)
        return output

    def _random(self, number: int | None) -> AbstractContextManager[None]:
        host = self._record.draws_on_host
        if number in self._record.random or host:
            return seeded(seed_of(*self._key, number), self._device, host=host)
        return nullcontext()

    def _keep(self, number: int, output: Any) -> None:
        """Remember what later stages need of a block's tensors."""
        wanted = [send for send in self._sends if send.block == number]
        if not wanted:
            return
        record = self._record.blocks[number]
        leaves = pytree.tree_leaves(output)
        attributes = {kept.slot.number: kept for kept in record.attributes}
        for send in wanted:
            if send.slot in attributes:
                kept = attributes[send.slot]
                module = self._calls.module(record.name).get_submodule(kept.module)
                self._sent[send] = getattr(module, kept.attribute)
            else:
                self._sent[send] = leaves[send.slot]

    def _stand_in(self, number: int, args: Any, kwargs: Any) -> Any:
        record = self._record.blocks[number]
        arguments = pytree.tree_leaves((args, kwargs))
        for kept in record.attributes:
            output = Output(number, kept.slot.number)
            if output in self._received:
                module = self._calls.module(record.name).get_submodule(kept.module)
                setattr(module, kept.attribute, self._received[output])
        return pytree.tree_unflatten([self._leaf(number, leaf, arguments) for leaf in record.leaves], record.structure)

    def _leaf(self, number: int, leaf: Any, arguments: Sequence[Any]) -> Any:
        if isinstance(leaf, SameAsArgument):
            return arguments[leaf.number]
        if not isinstance(leaf, Slot):
            return leaf
        received = self._received.get(Output(number, leaf.number))
        return self._stand_in_for(leaf.spec) if received is None else received

    def _stand_in_for(self, spec: TensorSpec) -> Tensor:
        return spec.stand_in(self._device, in_memory=self._record.writes_outside)

    # ------------------------------------------------------------------------------------- modules outside the blocks

    def stands_in_for(self, name: str) -> bool:
        """Whether nothing on this stage needs what the module returns."""
        return name in self._dead and self._stub_calls.get(name, 0) < len(self._record.stubs.get(name, ()))

    def stub(self, name: str) -> Any:
        """Return a stand-in of the kind that the module's next call returned in the record."""
        call = self._stub_calls.get(name, 0)
        self._stub_calls[name] = call + 1
        recorded = self._record.stubs[name][call]

        def stand_in(leaf: Any) -> Any:
            return self._stand_in_for(leaf) if isinstance(leaf, TensorSpec) else leaf

        return pytree.tree_map(stand_in, recorded)

    def _wrong_order(self, what: str) -> UnsupportedError:
        expected = self._plan.order[self._next] if self._next < len(self._plan.order) else "the end of the step"
        return UnsupportedError(
            explain(
                f"{what}, where {expected!r} was expected",
                "with pipeline parallelism every step calls every block once, in the order of the first step",
                "take out what skips or repeats blocks (layer drop), or use pipeline_parallel_size=1",
            )
        )


def _checked(tensor: Tensor, spec: TensorSpec, block: str) -> Tensor:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise UnsupportedError(
            explain(
                f"block {block!r} returned a tensor of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype} where {spec.shape} and {spec.dtype} were expected",
                "the stage after it prepares for shapes that follow from the batch's shapes alone",
                "let shapes inside the model not depend on the data's values",
            )
        )
    return tensor


def _own_memory(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.requires_grad and (tensor.is_leaf or tensor._is_view()) else tensor
