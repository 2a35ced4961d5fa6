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
