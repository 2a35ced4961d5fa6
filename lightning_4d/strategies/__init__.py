"""The strategies: what users give to ``Trainer(strategy=...)``."""

from lightning_4d.strategies.context import CPStrategy
from lightning_4d.strategies.hsdp import HSDPStrategy
from lightning_4d.strategies.nd import NDStrategy
from lightning_4d.strategies.pipeline import PPStrategy

__all__ = ["CPStrategy", "HSDPStrategy", "NDStrategy", "PPStrategy"]
