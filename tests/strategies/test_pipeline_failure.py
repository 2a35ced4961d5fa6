"""An error on one pipeline rank ends the job with the user's own exception and the lines of the user's code."""

from __future__ import annotations

import pytest

from tests.strategies.test_failure import Job

SCRIPT = """
import os, sys
from lightning.pytorch import Trainer
from lightning_4d import NDStrategy
from tests.modules import TinyGPT

kind, failing = sys.argv[1], int(sys.argv[2])


class UsersOwnError(Exception):
    pass


class Failing(TinyGPT):
    def training_step(self, batch, batch_idx):
        if kind == "train" and batch_idx == 2 and self.global_rank == failing:
            raise UsersOwnError("of the step")  # the user's own line
        if kind == "killed" and batch_idx == 2 and self.global_rank == failing:
            os._exit(7)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if kind == "validation" and batch_idx == 1 and self.global_rank == failing:
            raise UsersOwnError("of the step")  # the user's own line
        return super().validation_step(batch, batch_idx)


if __name__ == "__main__":
    with open(f"pid{os.environ.get('LOCAL_RANK', '0')}", "w") as file:
        file.write(str(os.getpid()))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=NDStrategy(pipeline_parallel_size=2), max_epochs=2, logger=False,
        limit_train_batches=4, limit_val_batches=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Failing(layers=2))
    print("FINISHED")
"""


@pytest.mark.parametrize(
    ("kind", "failing", "torchrun"),
    [
        ("train", 1, True),
        pytest.param("train", 0, False, marks=pytest.mark.slow),
        pytest.param("validation", 0, True, marks=pytest.mark.slow),
        pytest.param("validation", 1, False, marks=pytest.mark.slow),
        pytest.param("killed", 0, True, marks=pytest.mark.slow),
        pytest.param("killed", 1, False, marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_stage_ends_the_job(tmp_path, kind, failing, torchrun):
    job = Job(tmp_path, kind, failing, torchrun=torchrun, content=SCRIPT)
    assert not job.left_running(), job.output
    assert job.code != 0, job.output
    assert "FINISHED" not in job.output
    if kind != "killed":
        assert "UsersOwnError: of the step" in job.output, job.output
        assert 'raise UsersOwnError("of the step")  # the user\'s own line' in job.output, job.output
