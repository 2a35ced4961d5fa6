"""What a step leaves in attributes of the LightningModule: collected outputs, counters, a last loss.

In a pipeline only the last stage runs a step to its end, and in training once for each microbatch. What a step leaves
there is brought to what one run on the whole batch leaves, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor

from lightning_4d.errors import UnsupportedError, explain

_PLAIN = (int, float, str, bool, type(None))
_LIGHTNINGS = frozenset(vars(LightningModule())) | {"log"}


@dataclass
class Effects:
    """What a step changed.

    Attributes:
        added: list attribute → items appended to it.
        set: attribute → its new number, text or tensor.
        keyed: dict attribute → items added or changed.
        returned: what the step returned besides the loss, by key; changes nothing.
    """

    added: dict[str, list[Any]] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    keyed: dict[str, dict[Any, Any]] = field(default_factory=dict)
    returned: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.set or self.keyed or self.returned)

    def with_returned(self, result: Any) -> Effects:
        """Add what a training step returned besides the loss."""
        if isinstance(result, dict):
            self.returned = {key: value for key, value in result.items() if key != "loss"}
        return self

    def detach(self) -> None:
        """Let go of the graph of what was returned, as Lightning does."""
        self.returned = recursive_detach(self.returned)

    def leaves(self) -> dict[str, Any]:
        """Return the changed things by a name for messages, each an item of its own."""
        found = {f"self.{name} (item {i})": item for name, items in self.added.items() for i, item in enumerate(items)}
        found |= {f"self.{name}": value for name, value in self.set.items()}
        found |= {f"self.{n}[{k!r}]": v for n, items in self.keyed.items() for k, v in items.items()}
        return found | {f"the returned {key!r}": value for key, value in self.returned.items()}

    def with_leaves(self, leaves: dict[str, Any]) -> Effects:
        """Return the same changes with other things in their place."""
        values = iter(leaves.values())
        added = {name: [next(values) for _ in items] for name, items in self.added.items()}
        new = {name: next(values) for name in self.set}
        keyed = {name: {k: next(values) for k in items} for name, items in self.keyed.items()}
        return Effects(added, new, keyed, {key: next(values) for key in self.returned})

    def apply(self, module: LightningModule) -> None:
        """Make the changes."""
        for name, items in self.added.items():
            getattr(module, name).extend(items)
        for name, value in self.set.items():
            vars(module)[name] = value
        for name, items in self.keyed.items():
            getattr(module, name).update(items)


class Attributes:
    """The attributes of a module as they are now.

    Args:
        module: the user's.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        own = {name: value for name, value in vars(module).items() if name not in _LIGHTNINGS}
        self._values = {name: value for name, value in own.items() if isinstance(value, (*_PLAIN, Tensor))}
        self._lengths = {name: (value, len(value)) for name, value in own.items() if type(value) is list}
        self._items = {name: (value, dict(value)) for name, value in own.items() if type(value) is dict}

    def effects(self) -> Effects:
        """Return what has changed since.

        Raises:
            UnsupportedError: a list became shorter or another one.
        """
        found = Effects()
        for name, value in vars(self._module).items():
            if name in _LIGHTNINGS:
                continue
            if name in self._lengths:
                self._compare_list(name, value, found)
            elif name in self._items and value is self._items[name][0]:
                before = self._items[name][1]
                if changed := {k: v for k, v in value.items() if k not in before or before[k] is not v}:
                    found.keyed[name] = changed
            elif isinstance(value, (*_PLAIN, Tensor)) and self._differs(name, value):
                found.set[name] = value
        return found

    def _differs(self, name: str, value: Any) -> bool:
        if name not in self._values:
            return True
        before = self._values[name]
        return before is not value and (isinstance(value, Tensor) or isinstance(before, Tensor) or before != value)

    def _compare_list(self, name: str, value: Any, found: Effects) -> None:
        before, length = self._lengths[name]
        if value is not before or len(value) < length:
            raise UnsupportedError(
                explain(
                    f"a step replaces or shortens the list self.{name}",
                    "with pipeline parallelism a step may append to lists",
                    "clear or replace lists in on_train_epoch_end, on_validation_epoch_end, ...",
                )
            )
        if len(value) > length:
            found.added[name] = value[length:]

    def restore(self) -> None:
        """Undo what has changed since."""
        module = vars(self._module)
        for name in [n for n in module if n not in _LIGHTNINGS and isinstance(module[n], (*_PLAIN, Tensor))]:
            if name not in self._values:
                del module[name]
        module.update(self._values)
        for value, length in self._lengths.values():
            del value[length:]
        for value, before in self._items.values():
            if len(value) != len(before):
                value.clear()
                value.update(before)


def joined(name: str, items: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join what microbatches left in one place: equal things stay, tensors with a row for each sample are stacked.

    Raises:
        UnsupportedError: they are neither; names the attribute.
    """
    first = items[0]
    if isinstance(first, Tensor) and all(
        isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size
        for item, size in zip(items, sizes, strict=True)
    ):
        return torch.cat(list(items))
    if isinstance(first, _PLAIN) and all(item == first for item in items):
        return first
    raise UnsupportedError(
        explain(
            f"training_step leaves a {type(first).__name__} in {name}, once for each of {len(sizes)} microbatches",
            "scalars made of losses, and tensors with a row for each sample, are joined to the batch's; others are not",
            "log it with self.log, or use num_microbatches=1",
        )
    )


def is_scalar(value: Any) -> bool:
    """Whether a value may be combined by its rule as logged values are."""
    return isinstance(value, Tensor) and value.dim() == 0
