"""What operations do with a sequence that is divided among ranks. Importing the package registers the rules."""

from lightning_4d.parallel.context.rules import attention, elementwise, loss, metadata, product, reduction, shape

__all__ = ["attention", "elementwise", "loss", "metadata", "product", "reduction", "shape"]
