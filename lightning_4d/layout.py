"""`ParallelLayout`: the sizes of the five mesh axes, and the one judge of which sizes fit a number of processes.

The planner and the strategies both come here, so a layout that one proposes is a layout that the other accepts. This
file imports the standard library only (no torch, no Lightning), does no communication, and gives the same answer on
every rank: any rank may call anything here, alone.

Ranks are numbered row-major over `AXES`, outermost to innermost: neighbours along ``tp`` have consecutive ranks and
share a machine's fast links, while ``pp`` and ``dp_replicate`` are the axes that cross machines.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import isfinite, isqrt, prod
from typing import Literal, NamedTuple, SupportsIndex, TypeGuard

from lightning_4d.errors import LayoutError, explain

__all__ = [
    "AUTO",
    "AXES",
    "AxisLink",
    "ParallelLayout",
    "Size",
    "hsdp_sizes",
]

Size = int | Literal["auto"]
"""A size as a user writes it: a positive int, or "auto" for what remains after the other sizes."""

AUTO: Literal["auto"] = "auto"

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh axes, outermost to innermost."""

_MODEL_AXES = frozenset({"pp", "cp", "tp"})
_EXAMPLE = "pp2.dp2x4.cp1.tp8"
# Nine digits are more devices than there are, and few enough for int() to take without complaint.
_PART = re.compile(
    r"(?P<name>pp|cp|tp)(?P<size>[0-9]{1,9}) | dp((?P<replicate>[0-9]{1,9})x)?(?P<shard>[0-9]{1,9})",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of the pipeline, replicate, shard, context and tensor axes; immutable and hashable.

    Each size is a positive int (numpy integers are taken and stored as int; bool is refused). The product of the sizes
    is the number of processes (`world_size`). A size that is still to be found ("auto") belongs in `resolve`.

    Raises:
        LayoutError: A size is not an int of at least 1.

    >>> layout = ParallelLayout(data_parallel_replicate_size=2, data_parallel_shard_size=4, tensor_parallel_size=8)
    >>> str(layout), layout.world_size, layout.data_parallel_size, layout.model_parallel_size
    ('pp1.dp2x4.cp1.tp8', 64, 8, 8)
    """

    pipeline_parallel_size: int = 1
    data_parallel_replicate_size: int = 1
    data_parallel_shard_size: int = 1
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Store every size as a plain int, or refuse it by its keyword."""
        for field in fields(self):
            given = getattr(self, field.name)
            size = _as_int(given)
            if size is None or size < 1:
                raise _illegal_field(field.name, given)
            object.__setattr__(self, field.name, size)

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        pipeline_parallel_size: Size = 1,
        data_parallel_replicate_size: Size = 1,
        data_parallel_shard_size: Size = 1,
        context_parallel_size: Size = 1,
        tensor_parallel_size: Size = 1,
    ) -> ParallelLayout:
        """Find the layout of `world_size` processes; at most one size is "auto" and becomes what remains.

        Raises:
            LayoutError: A size is neither an int of at least 1 nor "auto", two sizes are "auto", or the product does
                not fit the world size. The message gives the nearest layout that works: the one that changes the
                fewest sizes, of these the fewest pipeline, context and tensor sizes, and then by the smallest ratio.

        >>> str(ParallelLayout.resolve(8, data_parallel_shard_size="auto", tensor_parallel_size=2))
        'pp1.dp1x4.cp1.tp2'
        >>> ParallelLayout.resolve(2, data_parallel_replicate_size=2, data_parallel_shard_size=2)
        ... # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        lightning_4d.errors.LayoutError: data_parallel_replicate_size=2, data_parallel_shard_size=2 with world_size=2:
        the product of the sizes (4) must equal the world size; set the Trainer's devices x num_nodes to 4, or use
        data_parallel_replicate_size=1, data_parallel_shard_size=2 (pp1.dp1x2.cp1.tp1).
        """
        given = (
            pipeline_parallel_size,
            data_parallel_replicate_size,
            data_parallel_shard_size,
            context_parallel_size,
            tensor_parallel_size,
        )
        keywords = {axis: field.name for axis, field in zip(AXES, fields(cls), strict=True)}
        return _Request(world_size, dict(zip(AXES, given, strict=True)), keywords).resolve()

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read the text form: parts in any order and case, separated by dots; a part left out is 1.

        ``dp8`` is short for ``dp1x8`` (one replica, eight shards).

        Raises:
            LayoutError: The text is empty, or a part is unknown, repeated or zero; the message names the part.

        >>> ParallelLayout.parse("pp2.dp2x4.cp1.tp8").sizes
        (2, 2, 4, 1, 8)
        >>> str(ParallelLayout.parse(" TP2.dp8 "))
        'pp1.dp1x8.cp1.tp2'
        """
        sizes: dict[str, int] = {}
        parts = [part.strip() for part in text.split(".")] if isinstance(text, str) and text.strip() else []
        faults = [fault for part in parts if (fault := _read_part(part, sizes))] if parts else ["it has no part"]
        # Where there is a fault, `sizes` holds what could be read: the nearest layout that the text can mean.
        layout = cls(*(max(1, sizes.get(axis, 1)) for axis in AXES))
        if faults:
            rule = f"a layout is written as parts with sizes of at least 1, each part once, such as {_EXAMPLE}"
            raise LayoutError(explain(f"layout text {text!r} ({', '.join(faults)})", rule, f"use {str(layout)!r}"))
        return layout

    def __str__(self) -> str:
        """Return the text form, e.g. ``pp2.dp2x4.cp1.tp8``: pipeline, dp replicate x shard, context, tensor.

        >>> str(ParallelLayout(2, 2, 4, 1, 8))
        'pp2.dp2x4.cp1.tp8'
        """
        pp, replicate, shard, cp, tp = self.sizes
        return f"pp{pp}.dp{replicate}x{shard}.cp{cp}.tp{tp}"

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The sizes in the order of `AXES`."""
        return (
            self.pipeline_parallel_size,
            self.data_parallel_replicate_size,
            self.data_parallel_shard_size,
            self.context_parallel_size,
            self.tensor_parallel_size,
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes by axis name, in the order of `AXES`.

        >>> ParallelLayout(tensor_parallel_size=2).axis_sizes
        {'pp': 1, 'dp_replicate': 1, 'dp_shard': 1, 'cp': 1, 'tp': 2}
        """
        return dict(zip(AXES, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        """The number of processes: the product of all sizes."""
        return prod(self.sizes)

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that read different samples: replicate x shard."""
        return self.data_parallel_replicate_size * self.data_parallel_shard_size

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that work together on the same samples: pp x cp x tp."""
        return self.pipeline_parallel_size * self.context_parallel_size * self.tensor_parallel_size

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along every axis.

        Raises:
            LayoutError: `rank` is not an int in ``0 .. world_size - 1``.

        >>> ParallelLayout.parse("pp2.dp2x2").coordinate(5)
        {'pp': 1, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 0}
        """
        rest = self._checked_index("rank", rank, self.world_size)
        indices: list[int] = []
        for size in reversed(self.sizes):
            rest, index = divmod(rest, size)
            indices.append(index)
        return dict(zip(AXES, reversed(indices), strict=True))

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at `coordinate` (axis name -> index); an axis of size 1 may be left out.

        Raises:
            LayoutError: An unknown axis, an index outside of its axis, or an axis of size 2 or more left out.

        >>> ParallelLayout.parse("pp2.dp2x2").rank({"pp": 1, "dp_replicate": 0, "dp_shard": 1})
        5
        """
        self._checked_axes(coordinate)
        missing = [axis for axis, size in self.axis_sizes.items() if size > 1 and axis not in coordinate]
        if missing:
            rule = f"in {self} a coordinate names every axis of size 2 or more"
            remedy = f"add an index for {', '.join(missing)}"
            raise LayoutError(explain(f"coordinate {dict(coordinate)!r}", rule, remedy))
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + self._checked_index(axis, coordinate.get(axis, 0), size)
        return rank

    def group_ranks(self, axes: str | Iterable[str], rank: int) -> list[int]:
        """Return, ascending, the ranks that differ from `rank` along `axes` only; `rank` itself is among them.

        Args:
            axes: One axis name or several, in any order, e.g. ``("dp_shard", "cp")``.
            rank: A global rank.

        Raises:
            LayoutError: An unknown axis, or `rank` is not in ``0 .. world_size - 1``.

        >>> layout = ParallelLayout.parse("dp2x2.tp2")
        >>> layout.group_ranks("tp", 5), layout.group_ranks(("dp_replicate", "dp_shard"), 5)
        ([4, 5], [1, 3, 5, 7])
        """
        chosen = self._checked_axes([axes] if isinstance(axes, str) else axes)
        here = self.coordinate(rank)
        ranks = [0]
        for axis, size in zip(AXES, self.sizes, strict=True):
            indices = range(size) if axis in chosen else (here[axis],)
            ranks = [base * size + index for base in ranks for index in indices]
        return ranks

    def groups(self, axis: str) -> list[list[int]]:
        """Return all groups of ranks that communicate along `axis`: each ascending, in the order of their first ranks.

        Raises:
            LayoutError: an unknown axis.

        >>> ParallelLayout.parse("dp2.tp2").groups("dp_shard")
        [[0, 2], [1, 3]]
        """
        self._checked_axes([axis])
        size, stride = self.axis_sizes[axis], self.stride(axis)
        firsts = (base + offset for base in range(0, self.world_size, size * stride) for offset in range(stride))
        return [list(range(first, first + size * stride, stride)) for first in firsts]

    def stride(self, axis: str) -> int:
        """Return how far apart the numbers of neighbours along `axis` are.

        Raises:
            LayoutError: an unknown axis.

        >>> ParallelLayout.parse("dp2x2.tp2").stride("dp_replicate")
        4
        """
        self._checked_axes([axis])
        return prod(self.sizes[AXES.index(axis) + 1 :])

    def axis_link(self, axis: str, per_node: int) -> AxisLink:
        """Return over which links the ranks of each group along `axis` communicate, on nodes of `per_node` ranks.

        Node n holds the ranks from n * `per_node` on.

        Raises:
            LayoutError: an unknown axis, or `per_node` is not an int of at least 1.

        >>> ParallelLayout.parse("dp2.tp8").axis_link("tp", 8), ParallelLayout.parse("dp2.tp8").axis_link("tp", 4)
        (AxisLink(axis='tp', groups=2, crossing=0), AxisLink(axis='tp', groups=2, crossing=2))
        """
        node = _checked_count("per_node", per_node)
        groups = self.world_size // self.axis_sizes[axis] if axis in AXES else len(self.groups(axis))
        size, stride = self.axis_sizes[axis], self.stride(axis)
        span = size * stride
        if size == 1 or node % span == 0:  # also the usual case of a layout of 16,384 ranks
            return AxisLink(axis, groups, 0)
        firsts = (base + offset for base in range(0, self.world_size, span) for offset in range(stride))
        crossing = sum(first // node != (first + span - stride) // node for first in firsts)
        return AxisLink(axis, groups, crossing)

    def data_parallel_rank(self, rank: int) -> int:
        """Return which share of the samples `rank` reads, in ``0 .. data_parallel_size - 1``, replicate-major.

        Raises:
            LayoutError: `rank` is not an int in ``0 .. world_size - 1``.

        >>> [ParallelLayout.parse("dp2x2.tp2").data_parallel_rank(rank) for rank in range(8)]
        [0, 0, 1, 1, 2, 2, 3, 3]
        """
        here = self.coordinate(rank)
        return here["dp_replicate"] * self.data_parallel_shard_size + here["dp_shard"]

    def _checked_index(self, name: str, given: object, size: int) -> int:
        index = _as_int(given)
        if index is None or not 0 <= index < size:
            nearest = 0 if index is None else min(max(index, 0), size - 1)
            rule = f"in {self} ({self.world_size} processes) it is an int from 0 to {size - 1}"
            raise LayoutError(explain(f"{name} {given!r}", rule, f"use {nearest}"))
        return index

    def _checked_axes(self, axes: Iterable[str]) -> frozenset[str]:
        chosen = tuple(axes)
        unknown = [axis for axis in chosen if axis not in AXES]
        if unknown:
            given = ", ".join(f"axis {axis!r}" for axis in unknown)
            raise LayoutError(explain(given, "a layout has five axes", f"use one or more of {', '.join(AXES)}"))
        return frozenset(chosen)


def hsdp_sizes(replicate: Size, shard: Size, world_size: int, num_nodes: int) -> tuple[int, int]:
    """Apply the HSDP rule: replicate over the nodes, shard inside a node.

    Args:
        replicate: The number of replicas, or "auto".
        shard: The number of shards of each replica, or "auto". Both "auto": one replica for each node. One "auto": what
            remains after the other.
        world_size: The number of processes, devices x num_nodes.
        num_nodes: The number of machines.

    Returns:
        ``(replicate, shard)``, whose product is `world_size`.

    Raises:
        LayoutError: As `ParallelLayout.resolve`, or both are "auto" and the nodes cannot hold equally many processes.

    >>> hsdp_sizes("auto", "auto", world_size=16, num_nodes=2), hsdp_sizes(4, "auto", world_size=16, num_nodes=2)
    ((2, 8), (4, 4))
    """
    keywords = {"dp_replicate": "replicate_size", "dp_shard": "shard_size"}
    nodes = _checked_count("num_nodes", num_nodes)
    both_auto = _is_auto(replicate) and _is_auto(shard)
    request = _Request(world_size, {"dp_replicate": nodes if both_auto else replicate, "dp_shard": shard}, keywords)
    if both_auto and request.world_size % nodes:
        given = f"replicate_size='auto', shard_size='auto' with world_size={request.world_size} and num_nodes={nodes}"
        rule = "one replica for each node needs equally many devices on every node"
        raise LayoutError(explain(given, rule, request.remedy()))
    layout = request.resolve()
    return layout.data_parallel_replicate_size, layout.data_parallel_shard_size


class AxisLink(NamedTuple):
    """Over which links the groups of an axis communicate: `crossing` of all `groups` have ranks on several nodes."""

    axis: str
    groups: int
    crossing: int

    @property
    def crosses(self) -> bool:
        """Whether the links between nodes carry any of the axis' traffic."""
        return self.crossing > 0


class _Request:
    """Sizes as someone asked for them, some perhaps illegal: resolves them, or says what is wrong and what would do.

    `given` maps some of the `AXES` to values of any type, the axes left out being 1 and not for the user to choose;
    `keywords` maps the same axes to the names by which the user knows the sizes.
    """

    def __init__(self, world_size: object, given: Mapping[str, object], keywords: Mapping[str, str]) -> None:
        self.world_size = _checked_count("world_size", world_size)
        self.keywords = keywords
        self.given = {axis: _plain(value) for axis, value in given.items()}
        self.autos = [axis for axis, value in self.given.items() if _is_auto(value)]
        self.illegal = [axis for axis, value in self.given.items() if not _is_auto(value) and not _is_size(value)]
        self.product = prod(value for value in self.given.values() if _is_size(value))

    def resolve(self) -> ParallelLayout:
        rule = self.broken_rule()
        if rule:
            given = f"{self.describe(self.given, changed=())} with world_size={self.world_size}"
            raise LayoutError(explain(given, rule, self.remedy()))
        return _filled(self.given, self.world_size)

    def broken_rule(self) -> str | None:
        if self.illegal:
            names = ", ".join(self.keywords[axis] for axis in self.illegal)
            return f"{names} must be an int of at least 1, or 'auto' for what remains after the other sizes"
        if len(self.autos) > 1:
            return "at most one size may be 'auto', which is what remains after the other sizes"
        if self.autos and self.world_size % self.product:
            return f"the product of the other sizes ({self.product}) must divide the world size: 'auto' is the rest"
        if not self.autos and self.world_size != self.product:
            return f"the product of the sizes ({self.product}) must equal the world size"
        return None

    def remedy(self) -> str:
        sizes, changed = self.nearest()
        use = f"use {self.describe(sizes, changed)} ({_filled(sizes, self.world_size)})"
        if self.illegal or len(self.autos) > 1:
            return use
        # The sizes are fine in themselves, so another number of devices is as good a cure.
        below = self.world_size // self.product * self.product if self.autos else 0
        above = below + self.product
        counts = f"{below} or {above}" if below else str(above)
        return f"set the Trainer's devices x num_nodes to {counts}, or {use}"

    def describe(self, sizes: Mapping[str, object], changed: Iterable[str]) -> str:
        """Write sizes as keyword arguments: those that are not 1 and those that changed (all, if there are none)."""
        ones = {axis for axis, size in sizes.items() if _is_size(size) and size == 1}
        shown = [axis for axis in sizes if axis not in ones or axis in changed] or list(sizes)
        return ", ".join(f"{self.keywords[axis]}={sizes[axis]!r}" for axis in shown)

    def nearest(self) -> tuple[dict[str, Size], frozenset[str]]:
        """Return the legal sizes nearest to the given ones, and the axes that had to change for them."""
        kept_auto = self.axis_left_auto()
        start: dict[str, Size] = {axis: self.start_size(axis, kept_auto) for axis in self.given}
        broken = {*self.illegal, *(axis for axis in self.autos if axis != kept_auto)}
        free = [axis for axis in self.given if axis in broken or start[axis] != AUTO]
        for count in range(len(broken), len(free) + 1):
            subsets = [frozenset(axes) for axes in combinations(free, count) if broken <= set(axes)]
            options = [option for axes in subsets if (option := self.option(start, axes))]
            if options:
                return min(options, key=lambda option: option.cost).choice
        raise AssertionError("unreachable: with every size free to change, the world size itself is a layout")

    def axis_left_auto(self) -> str | None:
        """Choose the axis that stays "auto", or becomes so because that is what its illegal value must have meant."""
        # Among several, "auto" for the shards is often only a default, and the other one what the user typed.
        order = ("tp", "pp", "cp", "dp_replicate", "dp_shard")
        meant = self.autos or [axis for axis in self.illegal if _means_auto(self.given[axis])]
        return next((axis for axis in order if axis in meant), None)

    def start_size(self, axis: str, kept_auto: str | None) -> Size:
        """Return the size from which a change along `axis` is measured: as given, or the one an illegal value meant."""
        return AUTO if axis == kept_auto else _nearest_size(self.given[axis])

    def option(self, start: Mapping[str, Size], changed: frozenset[str]) -> _Option | None:
        """Return the nearest legal sizes when the axes `changed` may change and no others; None if there are none."""
        targets = {axis: size for axis, size in start.items() if axis in changed and size != AUTO}
        held = prod(size for axis, size in start.items() if axis not in targets and size != AUTO)
        if self.world_size % held:
            return None
        closest = _closest(tuple(targets.values()), self.world_size // held, exact=AUTO not in start.values())
        if closest is None:
            return None
        ratio, values = closest
        sizes = {**start, **dict(zip(targets, values, strict=True))}
        layout = _filled(sizes, self.world_size)
        # Of equally near layouts take the one with fewer stages and replicas: more shards, which need less memory.
        cost = (len(_MODEL_AXES & changed), ratio, layout.sizes)
        return _Option(cost, (sizes, changed))


class _Option(NamedTuple):
    """Legal sizes with the axes changed for them, and how far they are from the given ones (compared left to right)."""

    cost: tuple[int, Fraction, tuple[int, ...]]
    choice: tuple[dict[str, Size], frozenset[str]]


@lru_cache(maxsize=4096)
def _closest(targets: tuple[int, ...], room: int, exact: bool) -> tuple[Fraction, tuple[int, ...]] | None:
    """Return the sizes nearest to `targets` whose product is `room` (exact) or divides it, or None if there are none.

    Before them stands their distance: the product of max(size, target) / min(size, target), 1 where nothing changes.
    """
    if not targets:
        return (Fraction(1), ()) if room == 1 or not exact else None
    options: list[tuple[Fraction, tuple[int, ...]]] = []
    for size in _divisors(room):
        rest = _closest(targets[1:], room // size, exact)
        if rest is not None:
            ratio = Fraction(max(size, targets[0]), min(size, targets[0]))
            options.append((ratio * rest[0], (size, *rest[1])))
    return min(options)


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def _filled(sizes: Mapping[str, object], world_size: int) -> ParallelLayout:
    """Return the layout of `sizes` by axis: an axis left out is 1, "auto" what remains of the world size."""
    remains = world_size // prod(size for size in sizes.values() if _is_size(size))
    filled = {axis: size if _is_size(size) else remains for axis, size in sizes.items()}
    return ParallelLayout(*(filled.get(axis, 1) for axis in AXES))


def _read_part(part: str, sizes: dict[str, int]) -> str | None:
    """Read one part of the text form into `sizes` by axis; return what is wrong with it, if anything."""
    match = _PART.fullmatch(part.lower())
    if match is None:
        return f"unknown part {part!r}"
    if match["name"]:
        read = {match["name"]: int(match["size"])}
    else:
        read = {"dp_replicate": int(match["replicate"] or 1), "dp_shard": int(match["shard"])}
    if read.keys() & sizes.keys():
        return f"repeated part {part!r}"
    sizes.update(read)
    return f"zero in part {part!r}" if 0 in read.values() else None


def _as_int(value: object) -> int | None:
    """Return an integer of any kind (numpy's too) as int; None for all else, bool included."""
    if type(value) is int:  # nearly always; a protocol check is slow
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # numpy's arrays and booleans have __index__, but no index
        return None


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _plain(value: object) -> object:
    number = _as_int(value)
    return value if number is None else number


def _as_number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and isfinite(number) else None


def _means_auto(value: object) -> bool:
    """Say whether an illegal size looks like "what remains": -1 as in device meshes, null, or a misspelt "auto"."""
    return value is None or _as_number(value) == -1 or (isinstance(value, str) and _as_number(value) is None)


def _nearest_size(value: object) -> int:
    """Return the positive int nearest to a size of any type: itself, a number rounded or in quotes, else 1."""
    return value if _is_size(value) else max(1, round(_as_number(value) or 1))


def _checked_count(name: str, given: object) -> int:
    count = _as_int(given)
    if count is None or count < 1:
        remedy = f"use {name}={_nearest_size(given)}"
        raise LayoutError(explain(f"{name}={given!r}", "a count is an int of at least 1", remedy))
    return count


def _illegal_field(keyword: str, given: object) -> LayoutError:
    if _is_auto(given):
        rule = "in a ParallelLayout every size is known, and 'auto' needs a number of processes"
        remedy = f"use ParallelLayout.resolve(world_size, {keyword}='auto')"
    else:
        rule, remedy = "a size is an int of at least 1", f"use {keyword}={_nearest_size(given)}"
    return LayoutError(explain(f"{keyword}={given!r}", rule, remedy))
