"""What a strategy refuses at set-up, by name, because it could not give the numbers of plain DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_4d.absent import is_absent
from lightning_4d.checkpoint.files import is_remote, local_path
from lightning_4d.errors import UnsupportedError, explain
from lightning_4d.layout import ParallelLayout
from lightning_4d.parallel.data import DataParallel

if TYPE_CHECKING:
    from lightning_4d.strategies.nd import NDStrategy


def refuse_unsupported(trainer: Trainer, strategy: NDStrategy) -> None:
    """Refuse callbacks that copy the whole module, and checkpoint folders where ranks cannot write together.

    Raises:
        UnsupportedError: names the callback.
        CheckpointError: names the path.
    """
    if strategy.layout.world_size > 1:
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
                raise UnsupportedError(
                    explain(
                        f"the callback {type(callback).__name__} with layout {strategy.layout}",
                        "it averages a copy of the whole module, made before parameters are sharded",
                        "remove it, or average in on_train_batch_end with the module's own (sharded) parameters",
                    )
                )
    if strategy.saves_folders:
        for callback in trainer.checkpoint_callbacks:
            path = getattr(callback, "dirpath", None) or trainer.default_root_dir
            if is_remote(path):
                local_path(path)


def refuse_in_pipeline(trainer: Trainer) -> None:
    """Refuse what cannot be done in pipeline stages, at set-up.

    Raises:
        UnsupportedError: names it.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise UnsupportedError(
            explain(
                "manual optimization (automatic_optimization=False) with pipeline parallelism",
                "the schedule runs forward and backward of the microbatches of all stages in its own order",
                "use automatic optimization, or pipeline_parallel_size=1",
            )
        )
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise UnsupportedError(
                explain(
                    f"{name} takes dataloader_iter",
                    "a pipeline cuts the batch that the Trainer fetches",
                    "take a batch instead",
                )
            )


def converts_to(plugin: Precision) -> str | None:
    """Return the precision that ``plugin`` converts all parameters to, or None if it leaves them."""
    precision = str(plugin.precision)
    return precision if precision.endswith("-true") and precision != "32-true" else None


def refuse_changed_model(
    module: LightningModule, existing: DataParallel, layout: ParallelLayout, plugin: Precision
) -> None:
    """Refuse a module that is sharded already, but in another way or only in part.

    Raises:
        UnsupportedError: the layout or the parameters' precision changed, or ``configure_model`` made new layers.
    """
    if existing.mesh.layout != layout:
        raise UnsupportedError(
            explain(
                f"a module sharded as {existing.mesh.layout} in a Trainer with layout {layout}",
                "a module keeps its layout for the life of the process",
                "save a checkpoint and load it into a new module, or keep the layout",
            )
        )
    if existing.converted_to != converts_to(plugin):
        raise UnsupportedError(
            explain(
                f"a module sharded with precision {existing.converted_to or 'as built'} in a Trainer with precision "
                f"{plugin.precision}",
                "parameters keep the precision they were sharded in",
                "save a checkpoint and load it into a new module, or keep the precision",
            )
        )
    plain = [name for name, p in module.named_parameters() if not isinstance(p, DTensor) and not is_absent(p)]
    if plain:
        raise UnsupportedError(
            explain(
                f"configure_model() made {plain[0]!r} again, in a module that is sharded already",
                "Lightning calls configure_model() before each fit, validate, test and predict",
                "return at once from configure_model() when the layers exist",
            )
        )


def refuse_lost_metrics(module: LightningModule) -> None:
    """Refuse torchmetrics built on the meta device: what their states start from is lost.

    Raises:
        UnsupportedError: names the metric.
    """
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric):
            continue
        lost = [key for key, state in metric.metric_state.items() if isinstance(state, Tensor) and state.is_meta]
        if lost:
            raise UnsupportedError(
                explain(
                    f"the metric {name!r} ({type(metric).__name__}) was built on the meta device",
                    f"the initial value of its state {lost[0]!r} is lost there",
                    "build metrics in __init__, outside torch.device('meta')",
                )
            )


def refuse_flattening(optimizer: Optimizer, layout: ParallelLayout) -> None:
    """Refuse an optimizer that takes all parameters as one vector, which sharded ones are not.

    Raises:
        UnsupportedError: names the optimizer.
    """
    if isinstance(optimizer, LBFGS) and layout.world_size > 1:
        raise UnsupportedError(
            explain(
                f"{type(optimizer).__name__} with layout {layout}",
                "it treats all parameters as one vector, and parameters are spread over ranks",
                "use an optimizer that updates each parameter by itself, such as AdamW or SGD, or one process",
            )
        )


def refuse_foreign_parameters(optimizer: Optimizer, module: LightningModule, data: DataParallel) -> None:
    """Refuse an optimizer that holds parameters which the module does not hold (any more).

    Raises:
        UnsupportedError: names the parameter where its name is known.
    """
    known = set(module.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in known:
                continue
            name = data.original_name(parameter)
            what = (
                f"the parameter {name!r} as it was before sharding" if name else "a parameter that is not the module's"
            )
            raise UnsupportedError(
                explain(
                    f"{type(optimizer).__name__} holds {what}, of shape {tuple(parameter.shape)}",
                    "sharding replaces parameters, and only those that the module holds afterwards are trained",
                    "take parameters from self.parameters() inside configure_optimizers(), not earlier",
                )
            )
