"""The package ``lightning_4d.callbacks``: callbacks for the Trainer, one file each.

The folder lies at the top of the repository and is reached as ``lightning_4d.callbacks``, in a checkout through the
link ``lightning_4d/callbacks``, once installed as a real folder. It is never the package ``callbacks``, a name that
users' own projects have.
"""

if __name__ != "lightning_4d.callbacks":
    raise ImportError(
        f"the folder 'callbacks' of lightning-4d was imported as {__name__!r}, "
        "but it is the package 'lightning_4d.callbacks' and its files would be loaded twice: "
        "write 'from lightning_4d.callbacks import ...' "
        "(a package 'callbacks' of your own must come earlier on sys.path)",
        name=__name__,
    )

from lightning_4d.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_4d.callbacks.mfu_monitor import MFUMonitor
from lightning_4d.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["ActivationCheckpointing", "MFUMonitor", "PipelineTimeline"]
