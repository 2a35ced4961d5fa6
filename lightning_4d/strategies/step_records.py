"""Records of a module's steps, one for each kind of step and shape of batch, made when they are first needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_4d.parallel.blocks import Block
from lightning_4d.parallel.pipeline.batch import signature
from lightning_4d.parallel.pipeline.record import StepRecord
from lightning_4d.parallel.pipeline.shapes import ShapeFamily, family_of
from lightning_4d.strategies.fake_step import record_step

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy

_MOST = 64  # records kept


class StepRecords:
    """Makes and keeps records."""

    def __init__(self, strategy: NDStrategy) -> None:
        self._strategy = strategy
        self._module: LightningModule | None = None
        self.blocks: Sequence[Block] = ()
        self._kept: OrderedDict[Any, StepRecord] = OrderedDict()
        self._families: dict[Any, ShapeFamily] = {}
        self._modules: list[nn.Module] = []
        self.made = 0  # how many runs on fake tensors there were

    def begin(self, module: LightningModule, blocks: Sequence[Block]) -> None:
        """Make records of this module from now on."""
        self._module, self.blocks = module, list(blocks)
        self._modules = list(module.modules())
        self._kept.clear()
        self._families.clear()

    def get(self, name: str, batch: Any, arguments: tuple[Any, ...]) -> StepRecord:
        """Return the record of a step on a batch of these shapes.

        Raises:
            UnsupportedError: the step cannot be followed.
        """
        return self.get_all(name, [batch], arguments)[0]

    def get_all(self, name: str, batches: Sequence[Any], arguments: tuple[Any, ...]) -> list[StepRecord]:
        """Return the records of one step's microbatches, see :meth:`get`; the module is looked at once for all."""
        state = self._state()
        return [self._get((name, state, signature(batch), len(arguments)), batch, arguments) for batch in batches]

    def _get(self, key: tuple[Any, ...], batch: Any, arguments: tuple[Any, ...]) -> StepRecord:
        record = self._kept.get(key)
        if record is None:
            record = self._new(key, batch, arguments)
        self._kept[key] = record
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return record

    def _state(self) -> tuple[Any, ...]:
        """What else a record depends on, and may change in a run: modules in training mode, parameters that train.

        And the epoch, by which steps decide on another course (a loss that comes in later).
        """
        assert self._module is not None
        modes = bytes(module.training for module in self._modules)
        # Not `parameters()`: it walks the module tree anew, which takes milliseconds.
        owned = (module._parameters.values() for module in self._modules)
        trained = bytes(p.requires_grad for values in owned for p in values if p is not None)
        return modes, trained, self._module.current_epoch

    def _new(self, key: tuple[Any, ...], batch: Any, arguments: tuple[Any, ...]) -> StepRecord:
        assert self._module is not None
        name, shapes = key[0], key[2]
        family = self._families.setdefault((*key[:2], family_of(shapes), len(arguments)), ShapeFamily())
        record = family.predict(shapes)
        if record is None:
            dim = self._strategy.sequence_dim
            record = record_step(
                self._module.trainer, self._module, name, batch, self.blocks, *arguments, sequence_dim=dim
            )
            self.made += 1
            family.add(shapes, record)
        return record
