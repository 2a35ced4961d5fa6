"""What a checkpoint holds of each data-parallel rank beside tensors of the model: random numbers and data position.

Lightning writes everything else from rank 0 alone, which is right for what is equal on all ranks.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_4d.strategies import random_state
from lightning_4d.strategies.data_position import MARK


def take(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Split ``checkpoint`` into what remains and this rank's state as bytes (uint8, 1-D).

    What remains keeps the states of the user's own resumable loaders where a plain Trainer looks for them.
    """
    loaders = _loader_states(checkpoint)
    kept = [state for state in loaders if not _is_ours(state)]
    return _with_loader_states(checkpoint, kept), _encode({"random": random_state.capture(), "loaders": loaders})


class Resumed(NamedTuple):
    """What :func:`give_back` returns."""

    checkpoint: dict[str, Any]
    """The checkpoint with this rank's loader states where Lightning looks for them."""
    random: dict[str, Any]
    """For :mod:`random_state`."""
    positions: list[Any]
    """For the training DataLoaders, in their order; Lightning would hand them on only in some kinds of restart."""


def give_back(checkpoint: Mapping[str, Any], state: Tensor, weights_only: bool | None) -> Resumed:
    """Read what :func:`take` made of this rank's state."""
    decoded = _decode(state, weights_only)
    loaders = decoded["loaders"]
    positions = [loader[MARK] for loader in loaders if _is_ours(loader)]
    return Resumed(_with_loader_states(checkpoint, loaders), decoded["random"], positions)


def give_back_elsewhere(
    checkpoint: Mapping[str, Any], state: Tensor, weights_only: bool | None, written: int, present: int
) -> tuple[dict[str, Any], list[Any]]:
    """As :func:`give_back` for another number of data-parallel ranks; random numbers are not those of any of them.

    Returns:
        The checkpoint, and positions for the training DataLoaders.
    """
    loaders = _decode(state, weights_only)["loaders"]
    positions = [_elsewhere(loader[MARK], (written, present)) for loader in loaders if _is_ours(loader)]
    kept = [{MARK: None} if _is_ours(loader) else loader for loader in loaders]
    return _with_loader_states(checkpoint, kept), positions


def _elsewhere(position: Mapping[str, Any], ranks: tuple[int, int]) -> dict[str, Any]:
    beginning = position["beginning"]
    if beginning is not None:
        beginning = {**beginning, "random": None, "generators": []}
    return {**position, "beginning": beginning, "generators": [], "ranks": ranks}


def _is_ours(state: Any) -> bool:
    return isinstance(state, Mapping) and MARK in state


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])


def _with_loader_states(checkpoint: Mapping[str, Any], states: list[Any]) -> dict[str, Any]:
    fit_loop = checkpoint.get("loops", {}).get("fit_loop")
    if fit_loop is None:
        return dict(checkpoint)
    own = {key: value for key, value in fit_loop["state_dict"].items() if key != "combined_loader"}
    if states:
        own["combined_loader"] = states
    return {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": {**fit_loop, "state_dict": own}}}


def _encode(state: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _decode(state: Tensor, weights_only: bool | None) -> Any:
    return torch.load(io.BytesIO(state.numpy().tobytes()), map_location="cpu", weights_only=weights_only)
