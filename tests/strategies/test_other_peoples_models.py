"""Ways in which people write LightningModules that are unlike those of :mod:`tests.modules`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_4d import NDStrategy
from tests.harness import compare, reference, train
from tests.modules import MLP, TinyGPT
from tests.pool import Pool, WorkerError


class Marked(TinyGPT):
    """Marks parameters in ``__init__``, in a block and outside, and reads the marks in ``configure_optimizers``."""

    def __init__(self) -> None:
        super().__init__()
        marked = [p for p in self.parameters() if p.ndim < 2]
        for parameter in marked:
            parameter.no_weight_decay = True  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in self.parameters():
            groups[getattr(parameter, "no_weight_decay", False)].append(parameter)
        return SGD(
            [{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False], "weight_decay": 0.5}], lr=0.1
        )


class ComplexFilter(MLP):
    """Filters its input by a learnable complex spectrum, next to real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x_BC: Tensor) -> Tensor:
        filtered_BC = torch.fft.irfft(torch.fft.rfft(x_BC.double()) * self.spectrum, n=x_BC.shape[1])
        return super().forward(filtered_BC.to(x_BC.dtype))


class Hooked(MLP):
    """Masks a gradient by a hook registered in ``__init__``."""

    def __init__(self, after_accumulation: bool) -> None:
        super().__init__()
        if after_accumulation:
            self.input.weight.register_post_accumulate_grad_hook(_halve)
        else:
            self.input.weight.register_hook(lambda gradient: gradient * 0.5)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("module", [Marked, ComplexFilter])
def test_equals_ddp(pool: Pool, module: type[MLP], replicate: int) -> None:
    actual = pool.run(2, train, module, partial(NDStrategy, data_parallel_replicate_size=replicate))
    compare(actual, reference(pool, 2, module), rtol=1e-10)


@pytest.mark.parametrize("after_accumulation", [False, True])
def test_a_gradient_hook_on_a_parameter_is_refused_by_name(pool: Pool, after_accumulation: bool) -> None:
    with pytest.raises(WorkerError, match=r"UnsupportedError.*gradient hook on the parameter 'input.weight'"):
        pool.run(2, train, partial(Hooked, after_accumulation), NDStrategy)


class InPlace(TinyGPT):
    """Changes parameters outside the blocks in place: in the step, before zero_grad, and through ``.data``."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.teacher = nn.Linear(16, 16)
        self.teacher.requires_grad_(False)
        self.student = nn.Linear(16, 16)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.embedding.weight.copy_(nn.functional.normalize(self.embedding.weight, dim=1))
            self.head.weight.data.clamp_(-0.2, 0.2)
        x = self.embedding(batch[0][:, :-1])
        return super().training_step(batch, batch_idx) + (self.student(x) - self.teacher(x)).square().mean()

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


@pytest.mark.parametrize("replicate", [1, 2])
def test_parameters_changed_in_place_during_a_step(pool: Pool, replicate: int) -> None:
    expected = reference(pool, 2, InPlace)
    actual = pool.run(2, train, InPlace, partial(NDStrategy, data_parallel_replicate_size=replicate))
    compare(actual, expected, rtol=1e-10)


class ByHand(MLP):
    """Manual optimization as people write it: gradients read, clipped and dropped through ``self.parameters()``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch, "train")
        self.zero_grad() if batch_idx % 2 else self.input.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
        return loss


@pytest.mark.parametrize("replicate", [1, 2])
def test_manual_optimization_through_self_parameters(pool: Pool, replicate: int) -> None:
    expected = reference(pool, 2, ByHand)
    actual = pool.run(2, train, ByHand, partial(NDStrategy, data_parallel_replicate_size=replicate))
    compare(actual, expected, rtol=1e-10)


class Penalty(TinyGPT):
    """A gradient penalty: a backward that builds a graph, through the blocks."""

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        x = self.embedding(batch[0][:, :-1]).detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y.square().mean() + gradient.square().mean()


class Captured(MLP):
    """Collects parameters before they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.penalised = [p for p in self.parameters() if p.ndim == 2]


@pytest.mark.parametrize(("module", "message"), [(Penalty, "create_graph=True"), (Captured, "attribute 'penalised'")])
def test_what_cannot_be_exact_is_refused_by_name(pool: Pool, module: type, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(2, train, module, NDStrategy)
