"""Pictures from plain data: no model, no process group, no Lightning is needed to draw one.

Pictures are PNG or SVG, by the path's suffix, and are drawn by matplotlib (the extra ``visual``), imported only when
one is drawn. Anything here may be called on any rank, alone.
"""

from lightning_4d.visual.bars import draw_memory, draw_time
from lightning_4d.visual.mesh import draw_mesh, mesh_text
from lightning_4d.visual.scatter import draw_scatter
from lightning_4d.visual.schedule import Cell, draw_schedule, efficiency, schedule_text

__all__ = [
    "Cell",
    "draw_memory",
    "draw_mesh",
    "draw_scatter",
    "draw_schedule",
    "draw_time",
    "efficiency",
    "mesh_text",
    "schedule_text",
]
