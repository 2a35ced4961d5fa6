"""NDStrategy against Hugging Face accelerate, each on its own terms: same Llama of transformers, data and optimizer.

    python -m tests.benchmarks accelerate [--readme]      (needs `pip install '.[bench]'`)

Four processes. Ours is an ordinary LightningModule around the model; theirs the loop of accelerate's documentation,
with model, optimizer and loader from `Accelerator.prepare`. Both take turns, and first prove that they train the same
numbers, as tests/benchmarks/nd.py says. Peak memory is that of runs of one side alone.

Accelerate trains on several processes without GPUs by DDP only: neither its FSDP2 nor a `ParallelismConfig` is taken
when its `distributed_type` is MULTI_CPU. So the processes are called MULTI_GPU before the Accelerator is made, the
device stays the CPU, and all that follows is accelerate's own choice.

Two axes: transformers divides the model while loading it, over both, as `DistributedConfig` says, and
`ParallelismConfig` tells accelerate the same sizes; transformers' Trainer works so too. The older way, accelerate's
FSDP plugin over a model divided by `tp_plan`, ends in accelerate 1.15 with transformers 5.24 with "cannot import name
'ReplicateParallel' from 'transformers.integrations.tensor_parallel'".
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_4d import NDStrategy
from tests.benchmarks.data_parallel import peak_mib
from tests.benchmarks.nd import WARM_UP, Contest, MakeOptimizer, adamw, measure, report
from tests.benchmarks.pipeline import Clock, fit
from tests.pool import Pool

NEEDED = ("accelerate", "transformers")
RANKS, ROWS, LENGTH, VOCABULARY = 4, 4, 128, 1024  # rows of a data-parallel rank
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    seed_everything(0, verbose=False)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def dataset(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(VOCABULARY, (RANKS * ROWS * (steps + 1), LENGTH), generator=generator))


class Llama(LightningModule):
    """Ours."""

    def __init__(self, steps: int, optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.model = llama()
        self._steps, self._optimizer = steps, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens_BT,) = batch
        return self.model(input_ids=tokens_BT, labels=tokens_BT).loss

    def train_dataloader(self) -> DataLoader:
        # Lightning would shuffle, and accelerate not: a step of both takes the same samples so.
        sampler = DistributedSampler(dataset(self._steps), shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(dataset(self._steps), batch_size=ROWS, sampler=sampler)

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer(self.parameters())


class Accelerated:
    """Theirs: calling it runs one step of the loop."""

    def __init__(self, model: Any, steps: int, optimizer: MakeOptimizer, **settings: Any) -> None:
        from accelerate import Accelerator, DistributedType, PartialState

        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        self._accelerator = Accelerator(**settings)
        loader = DataLoader(dataset(steps), batch_size=ROWS)
        prepared = self._accelerator.prepare(model.train(), optimizer(model.parameters()), loader)
        self._model, self._optimizer, batches = prepared
        self._batches, self.losses = iter(batches), list[float]()

    def __call__(self) -> None:
        (tokens_BT,) = next(self._batches)
        loss = self._model(input_ids=tokens_BT, labels=tokens_BT).loss
        self._accelerator.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())


def sharded(steps: int, optimizer: MakeOptimizer) -> Accelerated:
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    sizes = ParallelismConfig(dp_shard_size=RANKS)
    return Accelerated(llama(), steps, optimizer, fsdp_plugin=plugin, parallelism_config=sizes)


def divided(steps: int, optimizer: MakeOptimizer) -> Accelerated:
    from accelerate import ParallelismConfig
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    folder = Path("llama")  # in the working directory, which the ranks share
    if dist.get_rank() == 0:
        llama().save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
    return Accelerated(model, steps, optimizer, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))


CONTESTS = [
    Contest("dp 4: FSDP2", Llama, sharded, {"data_parallel_shard_size": RANKS}),
    Contest(
        "dp 2 x tp 2: FSDP2 + tensor parallelism",
        Llama,
        divided,
        {"data_parallel_shard_size": 2, "tensor_parallel_size": 2},
    ),
]


def alone(contest: Contest, ours: bool) -> float:
    """On one rank: by how many MiB a few steps of one side raise the peak of the process, the model included."""
    import accelerate  # noqa: F401  (what importing costs is no part of it)
    from transformers import LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    before = peak_mib()
    if ours:
        fit(Llama(WARM_UP, adamw), NDStrategy(**contest.sizes), RANKS, Clock(), max_steps=WARM_UP)
    else:
        step = contest.other(WARM_UP, adamw)
        for _ in range(WARM_UP):
            step()
    return peak_mib() - before


def row(contest: Contest, rounds: int, steps: int) -> dict[str, str]:
    cells = {"layout: accelerate's": contest.name} | measure(contest, "accelerate", rounds, steps)
    memory = [max(Pool().run(RANKS, alone, contest, ours, timeout=600)) for ours in (True, False)]
    return cells | {"peak memory, MiB: ours / accelerate": " / ".join(f"{mib:.0f}" for mib in memory)}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; with --readme write the table into README.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks accelerate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", type=int, choices=range(len(CONTESTS)), help="one of the comparisons, by position")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args(arguments)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"not compared with accelerate: {' and '.join(missing)} not installed (pip install '.[bench]')")
        return
    contests = CONTESTS if options.only is None else [CONTESTS[options.only]]
    report("accelerate", (row(each, options.rounds, options.steps) for each in contests), write=options.readme)
