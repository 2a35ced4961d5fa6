"""What the backward of each microbatch starts from, before the batch's totals are known.

With P the user's program from leaves to loss, the batch's gradient is the sum over leaves of dP/dleaf at the batch's
leaves times the leaf's gradient, which is a weighted sum over microbatches. Where dP/dleaf is known early the roots are
exact. Else it is estimated from the first microbatch, and the ratio of the true and the estimated derivative, which
must be the same for all leaves, corrects all gradients at the end. Nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.pipeline.combine import LeafValue, combine, wide
from lightning_4d.parallel.pipeline.finished import LOSS, Finished, Rules, leaves_of, refuse
from lightning_4d.parallel.pipeline.scalars import Constant, Environment, Form, Leaf, Node, Number, forms

__all__ = ["Seeds"]


class Seeds:
    """The roots of one batch, from the program of its first finished microbatch."""

    _SUMS = frozenset(["sum", "mean", "rows"])

    def __init__(
        self,
        first: Finished,
        rules: Rules,
        sizes: Sequence[int],
        index: int,
        entries: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        if first.loss is None:
            raise RuntimeError("the step returned no loss")
        self.program = first.loss
        self.sizes, self.rows = sizes, sum(sizes)
        self.scale = self.rows / sizes[index]  # from the first finished microbatch to the batch
        self.rules = rules
        self.kinds = [rules.opaque.get(i, leaf.kind) for i, leaf in enumerate(first.leaves)]
        self.used = sorted(leaf.index for leaf in leaves_of(first.loss) if first.leaves[leaf.index].differentiable)
        self.expected = {i: max(first.leaves[i].count, 1) * self.scale for i in self.used if self.kinds[i] == "mean"}
        self.numbers = [
            v * self.scale if rule == "sum" else v for rule, v in zip(rules.numbers, first.numbers, strict=True)
        ]
        self._first = first
        self.own = [i for i, constant in enumerate(first.constants) if constant.requires_grad]
        self._refuse_gradients_without_rule(first)
        self.totals: dict[int, Tensor] = {}
        self.early = self._form(first, constants_too=False).early
        if not self.early:
            self.totals = _early_totals(first, index, entries)
            self.early = self._form(first, constants_too=False).early
        self.corrigible = self._form(first, constants_too=True, numbers_late=True).uniform
        if not self.early and not self._form(first, constants_too=True).uniform:
            raise self._several_totals()
        self.mean_only = self.early and not self.totals and all(self.kinds[i] in ("mean", "rows") for i in self.used)
        self.slopes = None if self.early else self._estimated_slopes(first)

    # What the structure says ----------------------------------------------------------------------------------------

    def _form(self, first: Finished, constants_too: bool, numbers_late: bool = False) -> Form:
        def of_leaf(node: Node) -> Form:
            if isinstance(node, Leaf):
                known = node.index in self.totals or self.kinds[node.index] == "equal"
                return Form({node: ()} if node.index in self.used else {}, not known)
            if isinstance(node, Constant):
                return Form({node: ()} if constants_too and node.index in self.own else {}, False)
            late = isinstance(node, Number) and numbers_late and self.rules.numbers[node.index] != "equal"
            return Form({}, late)

        return forms(self.program, of_leaf)

    def _refuse_gradients_without_rule(self, first: Finished) -> None:
        if not self.used and not self.own and first.needs_gradient:
            raise refuse(LOSS, "its gradient comes from an operation that cannot be followed")
        for i in self.used:
            if self.kinds[i] not in self._SUMS:
                raise refuse(LOSS, f"the gradient of '{first.leaves[i].name}' does not add up over microbatches")

    @staticmethod
    def _several_totals() -> UnsupportedError:
        return refuse(
            LOSS,
            "its terms are divided by totals (such as the number of valid targets) that differ and are known after the "
            "last microbatch only",
        )

    # Roots ----------------------------------------------------------------------------------------------------------

    def root(self, index: int, part: Finished, loss: Tensor) -> Tensor:
        """What the backward of microbatch `index` starts from."""
        share = self.sizes[index] / self.rows
        if not loss.requires_grad:
            return loss
        if self.mean_only and all(part.leaves[i].count == self._in_proportion(i, index) for i in self.used):
            return loss * share
        scaled = [self._scaled(i, leaf, share) for i, leaf in enumerate(part.leaves)]
        if self.slopes is None:
            return Environment(scaled, part.constants, self.numbers).evaluate(self.program) * share
        variables = [*(scaled[i] for i in self.used), *(part.constants[i] for i in self.own)]
        return torch.stack([(v * s).sum() for v, s in zip(variables, self.slopes, strict=True)]).sum() * share

    def _in_proportion(self, i: int, index: int) -> int | float:
        if self.kinds[i] == "rows":
            return self._first.leaves[i].count
        return self.expected[i] * self.sizes[index] / self.rows

    def _scaled(self, i: int, leaf: LeafValue, share: float) -> Tensor:
        """The leaf as if its microbatch, a `share` of the batch, were the whole batch."""
        if i in self.totals:
            return self._guarded(leaf, self.totals[i])
        value = wide(leaf.value)
        if i not in self.used or self.kinds[i] == "rows":
            return value
        if self.kinds[i] == "sum":
            return value / share
        return value * (leaf.count / self.expected[i] / share) if leaf.count else torch.zeros_like(value)

    # Late derivatives -----------------------------------------------------------------------------------------------

    def _estimate(self, first: Finished) -> list[Tensor | None]:
        """The batch's leaves as the first microbatch suggests them; not zero or nan: it may divide by them."""
        estimates: list[Tensor | None] = []
        for kind, leaf in zip(self.kinds, first.leaves, strict=True):
            value = wide(leaf.value.detach())
            place = len(estimates)
            if place in self.totals:
                value = self._guarded(leaf, self.totals[place])
            elif value.is_floating_point() or value.dtype in (torch.int64, torch.int32):
                value = value * self.scale if kind == "sum" else value
                usable = value.isfinite() & (value != 0)
                value = torch.where(usable, value, torch.full_like(value, self.rows if kind == "sum" else 1))
            estimates.append(value)
        return estimates

    def _slopes(
        self, leaves: Sequence[Tensor | None], first: Finished, numbers: Sequence[float] | None = None
    ) -> list[Tensor]:
        """The derivatives of the program by the differentiable leaves and constants, at the given values."""
        with torch.enable_grad():
            given = [None if v is None else v.detach() for v in leaves]
            constants = [c.detach() for c in self._first.constants]
            inputs = [given[i].clone().requires_grad_() for i in self.used]  # pyright: ignore[reportOptionalMemberAccess]
            for i, variable in zip(self.used, inputs):
                given[i] = variable
            for place, constant in enumerate(first.constants):
                if place in self.own:
                    constants[place] = constant.detach().clone().requires_grad_()
                    inputs.append(constants[place])
            result = Environment(given, constants, self.numbers if numbers is None else numbers).evaluate(self.program)
            slopes = torch.autograd.grad(result, inputs, allow_unused=True)
        return [torch.zeros_like(v) if s is None else s for s, v in zip(slopes, inputs, strict=True)]

    def _estimated_slopes(self, first: Finished) -> list[Tensor]:
        """At the first microbatch's values. That of a single leaf may be anything but zero (a clamped loss) or nan."""
        slopes = self._slopes(self._estimate(first), first)
        if len(slopes) > 1:
            return slopes
        return [torch.where(slope.isfinite() & (slope != 0), slope, torch.ones_like(slope)) for slope in slopes]

    def correction(self, parts: Sequence[Finished], batch: Environment) -> Tensor | float | None:
        """The common ratio of true and used derivatives."""
        ratios = {self.expected[i] / max(sum(part.leaves[i].count for part in parts), 1) for i in self.expected}
        in_proportion = all(abs(ratio - 1) < 1e-12 for ratio in ratios)
        numbers_kept = all(abs(a - b) <= 1e-12 * abs(b) for a, b in zip(self.numbers, batch.numbers, strict=True))
        if self.slopes is None and in_proportion and numbers_kept:
            return None
        if not self.corrigible or not (in_proportion or (len(ratios) == 1 and len(self.expected) == len(self.used))):
            raise self._several_totals()
        ratio = 1.0 if in_proportion else ratios.pop()
        if self.slopes is None and numbers_kept:
            return ratio
        pairs = zip(self._first.leaves, batch.leaves, strict=True)
        leaves = [None if value is None else self._guarded(leaf, value) for leaf, value in pairs]
        used = self.slopes or self._slopes(leaves, self._first)
        true = self._slopes(leaves, self._first, batch.numbers)
        a, b = (
            torch.stack([s.sum().double() if s.device.type != "mps" else s.sum() for s in slopes])
            for slopes in (true, used)
        )
        return (a * b).sum() / (b * b).sum() * ratio

    @staticmethod
    def _guarded(leaf: LeafValue, value: Tensor) -> Tensor:
        """No valid target in the whole batch: the sum's gradient is zero, and stays so when not divided by zero."""
        return torch.where(value == 0, torch.ones_like(value), value) if leaf.guard else value


def _early_totals(first: Finished, index: int, entries: Sequence[Sequence[Tensor]] | None) -> dict[int, Tensor]:
    """Totals of the batch that its entries alone give, by the first finished microbatch's operations on the others'."""
    if entries is None or not first.replayable:
        return {}
    totals: dict[int, Tensor] = {}
    for leaf in leaves_of(first.loss):
        value = first.leaves[leaf.index]
        if value.kind == "sum" and value.origin is not None and not value.differentiable:
            try:
                others = [
                    Environment(own, (), ()).evaluate(value.origin) for j, own in enumerate(entries) if j != index
                ]
            except (
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
            ):  # e.g. a shape written out, which fits one microbatch only
                continue
            parts = [value, *(LeafValue("sum", other, value.name) for other in others)]
            totals[leaf.index] = combine(parts, ())
    return totals
