"""The strategies: what users give to ``Trainer(strategy=...)``."""

from lightning_4d.strategies.context import CPStrategy
from lightning_4d.strategies.hsdp import HSDPStrategy
from lightning_4d.strategies.nd import NDStrategy
from lightning_4d.strategies.pipeline import PPStrategy
from lightning_4d.strategies.tensor import TPStrategy

__all__ = ["CPStrategy", "HSDPStrategy", "NDStrategy", "PPStrategy", "TPStrategy"]
