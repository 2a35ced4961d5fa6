"""The strategies: what users give to ``Trainer(strategy=...)``."""

from lightning_4d.strategies.context import CPStrategy
from lightning_4d.strategies.hsdp import HSDPStrategy
from lightning_4d.strategies.nd import NDStrategy

__all__ = ["CPStrategy", "HSDPStrategy", "NDStrategy"]
