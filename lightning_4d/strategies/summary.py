"""A few lines, at the start of a fit, on how a model is divided over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_4d.parallel.tensor import divisions, whole_fraction

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy


def describe_division(strategy: NDStrategy) -> list[str]:
    """Return the layout, and what each axis but the data axes does to the module; nothing where none does.

    From set-up on. Which ranks must call: none has to; there is no communication.
    """
    layout = strategy.layout
    if layout.model_parallel_size == 1:
        return []
    lines = [f"layout {layout}: {layout.world_size} ranks, {layout.data_parallel_size} of which read different data"]
    if strategy.has_stages:
        lines.append(_stages(strategy))
    if layout.context_parallel_size > 1:
        kind = strategy.context_parallel_attention
        lines.append(f"  context: sequences in {layout.context_parallel_size} parts, {kind} attention")
    if layout.tensor_parallel_size > 1:
        lines.append(_layers(strategy))
    return lines


def _stages(strategy: NDStrategy) -> str:
    plan = strategy.pipeline.plan
    parameters = dict(strategy.pipeline.root.named_parameters())
    needed = strategy.pipeline.parameter_stages
    parts = []
    for stage in range(plan.stages):
        blocks = plan.blocks(stage)
        count = sum(parameters[name].numel() for name, stages in needed.items() if stage in stages)
        first, last = plan.order[blocks.start], plan.order[blocks.stop - 1]
        parts.append(f"{first if first == last else f'{first} to {last}'} ({count:,} parameters)")
    return f"  pipeline: {strategy.pipeline_schedule}, {plan.stages} stages: " + "; ".join(parts)


def _layers(strategy: NDStrategy) -> str:
    tensor = strategy.tensor
    assert tensor is not None
    rows = divisions(tensor.root, tensor.plan)
    styles: dict[str, int] = {}
    for row in rows:
        styles[row.style] = styles.get(row.style, 0) + row.count
    whole = styles.pop("replicate", 0)
    named = ", ".join(f"{count} {style}" for style, count in styles.items())
    share = 100 * whole_fraction(rows)
    return (
        f"  tensor: layers in {tensor.plan.size} parts: {named}; {whole} modules whole, {share:.1f} % of the parameters"
    )
