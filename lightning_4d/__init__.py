"""PyTorch Lightning strategies for every kind of parallelism, for ordinary LightningModules.

Importing the package registers the strategies' short names, so that ``Trainer(strategy="hsdp")`` works.
"""

from lightning_4d._version import __version__
from lightning_4d.layout import ParallelLayout
from lightning_4d.strategies import CPStrategy, HSDPStrategy, NDStrategy, PPStrategy, TPStrategy
from lightning_4d.strategies.registry import register_strategies

__all__ = ["CPStrategy", "HSDPStrategy", "NDStrategy", "PPStrategy", "ParallelLayout", "TPStrategy", "__version__"]

register_strategies()
