"""The table of kernels: every row accepts what ring attention gives it, and returns what it expects."""

from __future__ import annotations

import pytest
import torch

from lightning_4d import _torch_private as private
from lightning_4d.errors import UnsupportedError
from lightning_4d.parallel.context.kernels import KERNELS, BlockKernel, choose_kernel

CALLS = [(kernel, dtype) for kernel in KERNELS for dtype in sorted(kernel.dtypes, key=str)]
NAMES = [f"{kernel.name}-{kernel.device}-{str(dtype)[6:]}" for kernel, dtype in CALLS]


def check_signature(kernel: BlockKernel, dtype: torch.dtype, *, masked: bool, is_causal: bool) -> None:
    B, H, T, S, D = 2, 4, 50, 70, 64  # neither T nor S is a multiple of what kernels pad to
    G = 2 if kernel.grouped else H
    make = lambda *shape: torch.empty(shape, dtype=dtype, device=kernel.device)  # noqa: E731
    q, k, v = make(B, H, T, D), make(B, G, S, D), make(B, G, S, D)
    mask = make(B, 1, T, S) if masked else None
    out, lse = kernel.forward(q, k, v, mask, is_causal, 0.125)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert lse.shape == (B, H, T)
    if dtype != torch.float64:  # of which torch 2.11 says the wrong one without data
        assert lse.dtype == torch.float32
    assert out.device.type == lse.device.type == kernel.device
    lse = torch.empty((B, H, T), dtype=lse.dtype, device=kernel.device)  # merged, contiguous
    grads = kernel.backward(torch.empty_like(q), q, k, v, torch.empty_like(q), lse, mask, is_causal, 0.125)
    for grad, tensor in zip(grads, (q, k, v), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (tensor.shape, dtype, tensor.device)


@pytest.mark.parametrize(("kernel", "dtype"), CALLS, ids=NAMES)
def test_signature_on_fake_tensors(kernel, dtype):
    with private.fake_tensor_mode():
        check_signature(kernel, dtype, masked=False, is_causal=False)
        check_signature(kernel, dtype, masked=False, is_causal=True)
        if kernel.masks:
            check_signature(kernel, dtype, masked=True, is_causal=False)


def test_a_wrong_signature_is_noticed():
    swapped = BlockKernel(
        "swapped",
        "cuda",
        frozenset({torch.bfloat16}),
        masks=False,
        grouped=True,
        multiple=8,
        forward=lambda *args: KERNELS[1].forward(*args)[::-1],
        backward=KERNELS[1].backward,
    )
    with private.fake_tensor_mode(), pytest.raises(AssertionError):
        check_signature(swapped, torch.bfloat16, masked=False, is_causal=True)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "name"),
    [
        ("cpu", torch.float64, True, "flash"),
        ("cuda", torch.bfloat16, False, "flash"),
        ("cuda", torch.bfloat16, True, "efficient"),
        ("cuda", torch.float32, False, "efficient"),
        ("cuda", torch.float32, True, "efficient"),
    ],
)
def test_the_choice(device, dtype, masked, name):
    kernel = choose_kernel(device, dtype, masked=masked)
    assert (kernel.name, kernel.device) == (name, device)


def test_no_kernel_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="float64 on cuda with a mask"):
        choose_kernel("cuda", torch.float64, masked=True)
