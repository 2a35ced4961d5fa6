"""Pictures from plain data: no model, no process group, no Lightning is needed to draw one.

Pictures are PNG or SVG, by the path's suffix, and are drawn by matplotlib (the extra ``visual``), imported only when
one is drawn. Anything here may be called on any rank, alone.
"""

from lightning_4d.visual.schedule import Cell, draw_schedule, efficiency

__all__ = ["Cell", "draw_schedule", "efficiency"]
