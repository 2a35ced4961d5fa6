"""The short names of the strategies, for ``Trainer(strategy="hsdp")``."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_4d.strategies.context import CPStrategy
from lightning_4d.strategies.hsdp import HSDPStrategy
from lightning_4d.strategies.nd import NDStrategy
from lightning_4d.strategies.pipeline import PPStrategy
from lightning_4d.strategies.tensor import TPStrategy


def register_strategies() -> None:
    """Register each strategy by its name, unless someone else has registered that name."""
    for strategy in (NDStrategy, HSDPStrategy, PPStrategy, TPStrategy, CPStrategy):
        if strategy.strategy_name not in StrategyRegistry:
            summary = (strategy.__doc__ or "").strip().splitlines()[0]
            StrategyRegistry.register(strategy.strategy_name, strategy, description=summary)
