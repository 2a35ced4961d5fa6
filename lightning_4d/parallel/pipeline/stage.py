"""One stage of a pipeline, as torch's schedules drive it: receive, run, send, and the same backwards.

It stands in for ``torch.distributed.pipelining.PipelineStage``, which runs a hidden extra step to find shapes, takes
one shape for all microbatches of all steps, and wraps every error. Here each microbatch has its own shapes, known
beforehand, buffers live from their receive to their use, and errors are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_4d import _torch_private as private
from lightning_4d.parallel.pipeline.clock import Clock
from lightning_4d.parallel.pipeline.record import TensorSpec


@dataclass(frozen=True)
class Boundary:
    """What one microbatch receives from the stage before and sends to the stage after."""

    receives: tuple[TensorSpec, ...]
    sends: tuple[TensorSpec, ...]


Forward = Callable[["Stage", int, Sequence[Tensor]], Sequence[Tensor]]


class Stage:
    """One stage on this rank.

    Args:
        index: its number.
        ranks: the pipeline rank of each stage.
        group: the process group of the pipeline ranks.
        device: of its tensors.
        forward: runs one microbatch: gets the stage, the microbatch's number and the received tensors; returns what is
            sent, or on the last stage what a backward starts from.
        weights: the parameters of this stage that autograd sees.
        splits_backward: whether a schedule may ask for the gradients of inputs alone. Otherwise they are computed
            together with those of the weights.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        forward: Forward,
        weights: Callable[[], Iterable[Tensor]],
        *,
        splits_backward: bool,
    ) -> None:
        self.index = index
        self._ranks = ranks
        self._group = group
        self._forward = forward
        self._weights = weights
        self._splits = splits_backward
        # What torch's schedules read.
        self.stage_index, self.num_stages, self.device = index, len(ranks), device
        self.group, self.group_rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.stage_index_to_group_rank = dict(enumerate(ranks))
        self.submod = nn.Module()  # nothing that a schedule would have to gather or scale
        self.is_first, self.is_last = index == 0, index == len(ranks) - 1
        self.has_backward = False
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self.output_chunks: list[Any] = []
        self.chunks: int | None = None
        self.clock: Clock | None = None  # measures the computations of a step
        self.most_in_flight = 0  # microbatches whose activations were held at once, in the last step
        self.begin((), backward=False)

    def begin(self, boundaries: Sequence[Boundary], *, backward: bool) -> None:
        """Prepare for a step over microbatches with these shapes."""
        self._boundaries = boundaries
        self.has_backward = backward
        self.chunks = len(boundaries)
        self._received: dict[int, list[Tensor]] = {}
        self._held: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # inputs and outputs with their graph
        self._sent: dict[int, list[Tensor]] = {}
        self._output_gradients: dict[int, list[Tensor | None]] = {}
        self._input_gradients: dict[int, list[Tensor]] = {}
        self._pending: dict[int, Callable[[], None]] = {}  # backward of the weights
        self.most_in_flight = 0

    def is_done(self) -> bool:
        """Whether every microbatch of the step went through, in both directions where it has two."""
        return not (self._held or self._pending or self._output_gradients)

    # ------------------------------------------------------------------------------------------------------- forward

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Post the receives of a microbatch's inputs."""
        if self.is_first:
            return []
        specs = self._boundaries[microbatch].receives
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
        self._received[microbatch] = buffers
        return [self._operation(dist.irecv, buffer, self.index - 1) for buffer in buffers]

    def set_local_fwd_input(self, outputs: Any, microbatch: int) -> None:
        """Take the outputs of the stage before, which is on this rank as well."""
        self._received[microbatch] = [output.detach() for output in outputs]

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Run one microbatch."""
        inputs = [] if self.is_first else self._received.pop(microbatch)
        if self.has_backward:
            for tensor, spec in zip(inputs, self._boundaries[microbatch].receives, strict=not self.is_first):
                tensor.requires_grad_(spec.requires_grad)
        with self._timed("forward", microbatch):
            outputs = list(self._forward(self, microbatch, inputs))
        if self.has_backward:
            self._held[microbatch] = (inputs, outputs)
            self.most_in_flight = max(self.most_in_flight, len(self._held))
        if not self.is_last:
            self._sent[microbatch] = outputs
        return tuple(outputs)

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Send a microbatch's outputs."""
        outputs = self._sent.pop(microbatch, [])
        return [self._operation(dist.isend, output.detach(), self.index + 1) for output in outputs]

    # ------------------------------------------------------------------------------------------------------ backward

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Post the receives of the gradients of a microbatch's outputs."""
        if not self.has_backward or self.is_last:
            return []
        specs = self._boundaries[microbatch].sends
        buffers = [torch.empty(s.shape, dtype=s.dtype, device=self.device) if s.requires_grad else None for s in specs]
        self._output_gradients[microbatch] = buffers
        return [self._operation(dist.irecv, buffer, self.index + 1) for buffer in buffers if buffer is not None]

    def set_local_bwd_input(self, gradients: Sequence[Tensor], microbatch: int) -> None:
        """Take the gradients from the stage after, which is on this rank as well."""
        if not self.has_backward:
            return
        waiting = iter(gradients)
        specs = self._boundaries[microbatch].sends
        self._output_gradients[microbatch] = [next(waiting) if spec.requires_grad else None for spec in specs]

    def backward_one_chunk(
        self, microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one microbatch, or the part that the stage before waits for."""
        if not self.has_backward:
            return
        inputs, outputs = self._held.pop(microbatch)
        gradients = self._output_gradients.pop(microbatch, [None] * len(outputs))
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        roots, seeds = [o for o, _ in pairs], [g for _, g in pairs]
        if full_backward or not self._splits:
            with self._timed("backward", microbatch):
                self._whole_backward(roots, seeds)
            if not full_backward:
                self._pending[microbatch] = _nothing
        elif self.is_first:  # no stage before waits: all of it can come later
            self._pending[microbatch] = lambda: self._whole_backward(roots, seeds)
        else:
            with self._timed("input_gradient", microbatch):
                self._split_backward(microbatch, inputs, roots, seeds)
        self._input_gradients[microbatch] = [
            _taken(tensor)
            for tensor, spec in zip(inputs, self._receives(microbatch), strict=True)
            if spec.requires_grad
        ]

    def _receives(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return () if self.is_first else self._boundaries[microbatch].receives

    def _whole_backward(self, roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        if roots:
            with private.own_gradients(self._weights()):  # other microbatches add to them in place
                torch.autograd.backward(roots, seeds)  # pyright: ignore[reportArgumentType]

    def _split_backward(
        self, microbatch: int, inputs: list[Tensor], roots: list[Tensor], seeds: list[Tensor | None]
    ) -> None:
        seeds = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, seeds, strict=True)]
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        if not differentiable:
            self._pending[microbatch] = lambda: self._whole_backward(roots, seeds)
            return
        _, groups = private.backward_of_inputs(roots, seeds, differentiable, self._weights())
        self._pending[microbatch] = lambda: self._backward_of_weights(groups)

    def _backward_of_weights(self, groups: list[dict[str, Any]]) -> None:
        weights = self._weights()
        with private.own_gradients(weights):
            private.backward_of_weights(weights, groups)

    def backward_weight_one_chunk(self, microbatch: int, last_backward: bool = False) -> None:
        """Run the part of a backward that no other stage waits for."""
        if not self.has_backward:
            return
        pending = self._pending.pop(microbatch)
        if pending is not _nothing:
            with self._timed("backward" if self.is_first else "weight_gradient", microbatch):
                pending()

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Send the gradients of a microbatch's inputs."""
        if not self.has_backward or self.is_first:
            return []
        gradients = self._input_gradients.pop(microbatch)
        return [self._operation(dist.isend, gradient, self.index - 1) for gradient in gradients]

    def get_local_bwd_output(self, microbatch: int) -> list[Tensor]:
        """Hand over the gradients of a microbatch's inputs to the stage before, which is on this rank as well."""
        return self._input_gradients.pop(microbatch) if self.has_backward else []

    def _timed(self, kind: str, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.span(kind, microbatch, self.index)

    # --------------------------------------------------------------------------------- what schedules call besides

    def _operation(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self._group, group_peer=self._ranks[stage])

    def clear_runtime_states(self) -> None:
        """Nothing outlives a step."""

    def perform_reduce_grad(self, _scale: int) -> None:
        """Gradients are reduced after the schedule, once their factor is known."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None


def _taken(tensor: Tensor) -> Tensor:
    """The gradient of a received tensor, contiguous; zeros where nothing depends on it."""
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor, requires_grad=False) if gradient is None else gradient.contiguous()


def _nothing() -> None:
    return None
