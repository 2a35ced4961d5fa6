"""The planner: which layout, will it fit, how fast, and why.

From the sizes of a model and the facts of a cluster it predicts memory and step time of every legal layout, microbatch,
pipeline schedule and checkpointing policy, and ranks those that fit. Plain arithmetic on numpy columns: no Lightning, no
process group, nothing runs on a device. Any rank, or a machine without any, may call anything here, alone.
"""

from lightning_4d.planner.cluster import ClusterFacts, DeviceFacts
from lightning_4d.planner.families import Rejection, rejections
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.recipe import recipe
from lightning_4d.planner.report import print_report
from lightning_4d.planner.search import Candidate, Search, search, smallest
from lightning_4d.planner.sources import cluster_facts, from_hugging_face, model_facts
from lightning_4d.planner.space import Limits
from lightning_4d.planner.timeline import timeline
from lightning_4d.planner.trainer_file import trainer_yaml

__all__ = [
    "Candidate",
    "ClusterFacts",
    "DeviceFacts",
    "Limits",
    "ModelFacts",
    "Rejection",
    "Search",
    "cluster_facts",
    "from_hugging_face",
    "model_facts",
    "print_report",
    "recipe",
    "rejections",
    "search",
    "smallest",
    "timeline",
    "trainer_yaml",
]
