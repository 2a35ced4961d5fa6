"""Imports every module that registers rules, so that one import is enough."""

from lightning_4d.parallel.tensor import attention, loss, pointwise, products, randomness, reductions, shapes

__all__ = ["attention", "loss", "pointwise", "products", "randomness", "reductions", "shapes"]
