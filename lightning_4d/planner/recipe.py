"""The staged advice that practitioners give, beside what the search found: where they differ, by how much.

below about 1B parameters and up to 128 devices: plain data parallelism, the largest batch that fits
above 1B: shard parameters, FSDP or HSDP
out of memory: activation checkpointing
more than 256 devices: HSDP, sized to the fast domain
above 50B parameters or sequences over 16K: tensor, pipeline and context parallelism
then tune for MFU
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_4d.planner.numbers import GIB
from lightning_4d.planner.search import Candidate, Search

__all__ = ["Stage", "recipe"]

SMALL, LARGE, LONG = 1e9, 50e9, 16_384
FEW, MANY = 128, 256


@dataclass(frozen=True)
class Stage:
    """A piece of advice as it applies here.

    Attributes:
        advice: what practitioners say.
        finding: what the search says of it, with numbers.
        agrees: whether the best plan follows it.
    """

    advice: str
    finding: str
    agrees: bool

    def __str__(self) -> str:
        return f"{self.advice}: {self.finding}"


def recipe(found: Search) -> list[Stage]:
    """Return the stages of the recipe that apply, each compared with the search."""
    parameters = float(np.asarray(found.model.parameters))
    devices, length = found.cluster.devices, float(np.asarray(found.model.seq_len))
    billions = f"{parameters / 1e9:.3g}B parameters on {devices} devices"
    stages = []
    if parameters < SMALL and devices <= FEW:
        stages.append(_stage(found, f"{billions}: plain data parallelism", _plain(found)))
    elif parameters <= LARGE and length <= LONG:
        stages.append(_stage(found, f"{billions}: shard parameters (FSDP or HSDP)", _sharded(found)))
    if devices > MANY and parameters >= SMALL:
        stages.append(_stage(found, f"more than {MANY} devices: HSDP sized to the fast domain", _hybrid(found)))
    if parameters > LARGE or length > LONG:
        why = f"{parameters / 1e9:.0f}B parameters" if parameters > LARGE else f"sequences of {length:.0f}"
        stages.append(_stage(found, f"{why}: tensor, pipeline or context parallelism", _model_parallel(found)))
    stages.append(_checkpointing(found))
    stages.append(_tuning(found))
    return stages


def _sizes(found: Search) -> tuple[NDArray[np.float64], ...]:
    plan = found.space.plan
    return tuple(np.asarray(size) for size in (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp))


def _plain(found: Search) -> NDArray[np.bool_]:
    pp, _, shard, cp, tp = _sizes(found)
    return (pp == 1) & (shard == 1) & (cp == 1) & (tp == 1)


def _sharded(found: Search) -> NDArray[np.bool_]:
    pp, _, shard, cp, tp = _sizes(found)
    return (pp == 1) & (shard > 1) & (cp == 1) & (tp == 1)


def _hybrid(found: Search) -> NDArray[np.bool_]:
    pp, replicate, shard, _, tp = _sizes(found)
    return (pp == 1) & (replicate > 1) & (shard * tp == found.cluster.devices_per_node)


def _model_parallel(found: Search) -> NDArray[np.bool_]:
    pp, _, _, cp, tp = _sizes(found)
    return (pp > 1) | (cp > 1) | (tp > 1)


def _stage(found: Search, advice: str, mask: NDArray[np.bool_]) -> Stage:
    best = int(found.order[0])
    if mask[best]:
        return Stage(advice, f"the search agrees, {found.best.layout}", True)
    row = found.of(mask)
    if row is None:
        if not mask.any():
            return Stage(advice, f"impossible here; the search takes {found.best.layout}", False)
        least = float(found.bytes[mask].min()) / GIB
        text = f"does not fit ({least:.0f} of {found.capacity / GIB:.0f} GiB); the search takes {found.best.layout}"
        return Stage(advice, text, False)
    other = found.candidate(row)
    faster = found.seconds[row] / found.seconds[best] - 1
    if faster < 0.02:
        return Stage(advice, f"as fast as the search's {found.best.layout}, within the model's accuracy", True)
    return Stage(advice, f"the search's {found.best.layout} is {faster:.0%} faster than {other}", False)


def _checkpointing(found: Search) -> Stage:
    advice = "out of memory: activation checkpointing"
    best = found.best
    plain = (
        found.of(found.space.policy == found.space.policies.index("none")) if "none" in found.space.policies else None
    )
    if best.policy == "none":
        return Stage(advice, f"not needed, {_memory(best)}", True)
    if plain is None:
        return Stage(advice, f"needed: without it nothing fits; {best.policy} takes {_memory(best)}", True)
    slower = found.seconds[plain] / found.seconds[int(found.order[0])] - 1
    text = f"{best.policy} with {best.layout} is {slower:.0%} faster than doing without, by {found.candidate(plain)}"
    return Stage(advice, text, True)


def _memory(best: Candidate) -> str:
    return f"{best.bytes / GIB:.0f} of {best.capacity / GIB:.0f} GiB"


def _tuning(found: Search) -> Stage:
    best = found.best
    waits = {name: best.parts[name] for name in best.parts if name not in ("matmul", "attention")}
    largest = sorted(waits, key=lambda name: -waits[name])[:2]
    text = " and ".join(f"{name} {waits[name] / best.seconds:.0%}" for name in largest)
    return Stage("then tune for MFU", f"predicted {best.mfu:.0%}; what costs most beside the products: {text}", True)
