"""Seconds of collectives, from where the ranks of a group sit: inside a fast domain, or across nodes.

A group has `size` ranks that are `stride` ranks apart. All groups of an axis communicate at the same time, so a group
that crosses nodes has, of each node's network, the share of its members there: a group with 8 ranks on every node uses
all of the node's adapters, one with a single rank there an eighth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_4d.planner.constants import Constants
from lightning_4d.planner.facts import Machine
from lightning_4d.planner.numbers import Number

__all__ = ["Group", "gather_seconds", "transfer_seconds"]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how far apart their numbers are."""

    size: Number
    stride: Number


def _link(machine: Machine, c: Constants) -> Number:
    own = np.asarray(machine.link_share, float)
    return machine.link * np.where(np.isnan(own), c.nvlink_share, own)


def _network(machine: Machine, c: Constants) -> Number:
    own = np.asarray(machine.network_share, float)
    usual = np.where(np.asarray(machine.slow_fabric) > 0, c.slow_fabric_share, c.rdma_share)
    return machine.network * np.where(np.isnan(own), usual, own)


def gather_seconds(bytes_: Number, group: Group, machine: Machine, c: Constants, collectives: Number = 1) -> Number:
    """Return the seconds of an all-gather (or a reduce-scatter) whose whole tensor has `bytes_`; 0 for a single rank.

    An all-reduce is two of them.

    Args:
        bytes_: of the gathered tensor.
        group: which ranks.
        machine: the links.
        c: the constants.
        collectives: into how many calls the bytes are divided; each has its own latency.
    """
    size, stride = np.asarray(group.size, float), np.asarray(group.stride, float)
    members = np.clip(np.floor(machine.node / stride), 1, size)  # of this group on one node
    crosses = size * stride > machine.node
    inside = bytes_ * (1 - 1 / members) / _link(machine, c)
    share = members / machine.node  # of the node's network
    across = bytes_ * (1 - members / size) / (share * _network(machine, c))
    latency = np.where(crosses, c.inter_latency * size**c.latency_power, c.intra_latency)
    seconds = np.where(crosses, np.maximum(inside, across), inside) + collectives * latency
    return np.where(size > 1, seconds, 0.0)


def transfer_seconds(bytes_: Number, stride: Number, machine: Machine, c: Constants) -> Number:
    """Return the seconds in which every rank sends `bytes_` to the rank `stride` further on."""
    crosses = np.asarray(stride) >= machine.node
    rate = np.where(crosses, _network(machine, c) / machine.node, _link(machine, c))
    return bytes_ / rate
