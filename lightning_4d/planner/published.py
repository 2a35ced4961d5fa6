"""Published training runs: reading a CSV file of them into the planner's facts, and their results into seconds per step.

Each row describes a model, a machine, a layout and what was measured. Only the description goes into a prediction; the
measured columns (step time, MFU, TFLOP/s, tokens/s, memory) are read for comparison alone. A column left blank is filled
by a rule that is written down here: from other columns, from what is known of the accelerator, or from what is known of
the program that ran (`PROGRAMS`: which attention kernel it has, how it reduces gradients). Those are facts, not fitted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_4d.planner.cluster import ClusterFacts, DeviceFacts, device_facts
from lightning_4d.planner.facts import ATTENTION, RECOMPUTE, SCHEDULES, Machine, Plan, Recompute, Software
from lightning_4d.planner.model import ModelFacts
from lightning_4d.planner.numbers import GIB
from lightning_4d.planner.presets import MODELS

__all__ = ["PROGRAMS", "Run", "Table", "read_runs", "read_table", "table_of"]

Row = Mapping[str, str]


@dataclass(frozen=True)
class Program:
    """What is known of a training program, beside its name.

    Attributes:
        pattern: a regular expression found in the row's source or model name, in lower case.
        attention: its kernel, one of `ATTENTION`.
        gradient_bytes: of a gradient where it is reduced.
        eager: whether norms, rotations and activations run one kernel per operation.
        sequence_parallel: whether its tensor parallelism also shards the norms.
        recompute: what it recomputes where a row does not say.
        virtual: stages per rank where a row has an interleaved schedule and does not say.
        fabric: its cluster's network where a row does not say, as the interconnect column writes it.
        zero: what it shards over dp_shard where a row does not say.
        early_stop: whether recomputing a block ends at the last tensor that is needed (torch's checkpoint since 2.1).
        collectives: by which one block's parameters are gathered: 1 with FSDP.
        overlaps_gradients: whether it reduces gradients during the last backward.
        overlaps_gathers: whether it gathers parameters ahead.
        blocking: whether it ran with CUDA_LAUNCH_BLOCKING=1.
        gradient_memory: bytes of a gradient in memory, where it is more than on the wire.
        master_bytes: of optimizer state for each parameter; 16 where fp16 gradients are copied to fp32 for the step.
        logit_memory: bytes of memory per logit: 4 with a fused loss, 12 with plain torch.
        bucket_bytes: of fixed communication buffers: DeepSpeed reduces and gathers through 5e8 elements each.
        fp32_copies: whether norms and rotations keep copies in fp32.
        pp_microbatches: whether it cuts a batch into as many microbatches as stages where a row does not say.
        step_bytes: of temporaries of the optimizer's step: 8 where it is not fused, 4 more for fp32 copies of gradients.
        balances_stages: whether it deals blocks to pipeline ranks by cost.
    """

    pattern: str
    attention: str
    gradient_bytes: int = 4
    eager: bool = False
    sequence_parallel: bool = True
    recompute: str = "none"
    virtual: int = 2
    fabric: str = ""
    zero: int = 1
    early_stop: bool = True
    collectives: int = 1
    balances_stages: bool = False
    overlaps_gradients: bool = True
    overlaps_gathers: bool = True
    blocking: bool = False
    gradient_memory: int = 0
    master_bytes: int = 12
    logit_memory: int = 4
    bucket_bytes: float = 0.0
    fp32_copies: bool = False
    pp_microbatches: bool = False
    step_bytes: int = 0


PROGRAMS: tuple[Program, ...] = (
    # DeepSpeed ZeRO-3 of 2021 gathers each parameter by itself: 12 of a GPT block.
    Program(r"deepspeed zero-3", "unfused", 2, zero=3, early_stop=False, collectives=12, overlaps_gathers=False),
    # Megatron-LM before FlashAttention: fused softmax, scores in memory; fp16 gradients.
    Program(
        r"sc'21|2104\.04473|makefile tables|megatron-deepspeed",
        "unfused",
        2,
        sequence_parallel=False,
        early_stop=False,
        overlaps_gradients=False,
    ),
    Program(
        r"bigscience|bloom",
        "unfused",
        2,
        sequence_parallel=False,
        fabric="4x100Gb/s Omni-Path per node",
        early_stop=False,
        overlaps_gradients=False,
        blocking=True,
        master_bytes=16,
        logit_memory=6,
        bucket_bytes=2e9,
    ),
    Program(r"2205\.05198", "unfused", 2, zero=0, early_stop=False, overlaps_gradients=False),
    # Composer: FSDP with bf16 reduction; its MPT models use Triton's FlashAttention on A100.
    Program(r"llm-foundry", "flash1", 2, zero=3),
    # torchtitan: SDPA (FlashAttention 2), fp32 reduction, eager norms and rotary embedding unless compiled.
    Program(r"torchtitan", "flash2", 4, eager=True, zero=3, logit_memory=12, fp32_copies=True, pp_microbatches=True),
    Program(
        r"nanotron",
        "flash2",
        4,
        fabric="400 GB/s EFA per node",
        collectives=9,
        balances_stages=True,
        logit_memory=10,
        fp32_copies=True,
    ),
    Program(r"internevo|internlm", "flash2", 2, early_stop=False, collectives=9, logit_memory=10, step_bytes=12),
    # NeMo and Megatron-LM since 2024: cuDNN attention, fp32 or bf16 reduction, ZeRO-1.
    Program(r"nemo|megatron-bridge|megatron-lm|megatron/", "flash3", 4),
    # MaxText on GPUs: cuDNN attention, XLA fuses; GCP A3 has 8 x 100 Gb/s and TCP.
    Program(r"maxtext.*gpu", "flash3", 2, fabric="100 GB/s TCP per node", zero=3),
    Program(r"llama 3 herd|2407\.21783", "flash2", 4, virtual=8),
)
_UNKNOWN = Program(r"", "flash2")


def program_of(row: Row) -> Program:
    """Return what is known of the program that ran a row; the usual of today where it is not known."""
    text = f"{row.get('source', '')} {row.get('model_name', '')} {row.get('notes', '')}".lower()
    return next((program for program in PROGRAMS if re.search(program.pattern, text)), _UNKNOWN)


@dataclass(frozen=True)
class Run:
    """A row, read: the facts that a prediction takes, and beside them what was published.

    Attributes:
        row: the row as it stands in the file.
        model, machine, software, plan: facts for the cost model.
        seconds: published step time, NaN where there is none.
        memory: published memory of the fullest device in bytes, NaN where there is none.
    """

    row: Row
    model: ModelFacts
    machine: Machine
    software: Software
    plan: Plan
    seconds: float
    memory: float

    @property
    def is_gpu(self) -> bool:
        """Whether it ran on GPUs."""
        return "TPU" not in self.row["gpu_type"].upper()

    @property
    def is_fp8(self) -> bool:
        """Whether matrix products ran in fp8."""
        return "fp8" in self.row["precision"].lower()


def read_runs(path: str | Path) -> list[Run]:
    """Read a CSV file of published runs, every row of it."""
    with open(path, newline="") as file:
        return [read_run(row) for row in csv.DictReader(file)]


def read_run(row: Row) -> Run:
    """Read one row. Sizes that it leaves blank are those of the preset that the model's name tells."""
    program = program_of(row)
    model = _model(row)
    plan = _plan(row, program)
    machine = _machine(row, program)
    seconds = _published_seconds(row, model, plan)
    memory = _float(row, "memory_gib_per_gpu") * GIB
    return Run(row, model, machine, _software(row, program), plan, seconds, memory)


# ------------------------------------------------------------------------------------------------------------- the model


def _model(row: Row) -> ModelFacts:
    if not _int(row, "layers") or not _int(row, "hidden"):
        return _preset(row)
    hidden = _int(row, "hidden")
    head_dim = _int(row, "head_dim") or 128
    heads = _int(row, "heads") or hidden // head_dim
    matrices = _int(row, "ffn_matrices") or (2 if _int(row, "ffn_hidden") else 3)
    # A gated feed-forward part is 8/3 wide by custom, which costs as much as two matrices of 4.
    ffn = _int(row, "ffn_hidden") or -(-8 * hidden // 3 // 256) * 256
    vocab = _int(row, "vocab") or _usual_vocabulary(row)
    sizes = (_int(row, "layers"), hidden, heads, _int(row, "kv_heads") or heads, head_dim, ffn, matrices, vocab)
    bare = ModelFacts(*(float(size) for size in sizes), seq_len=float(_int(row, "seq_len") or 2048))
    total = _float(row, "params_total")
    outside = total - bare.layers * bare.block_parameters
    # GPT models tie the head to the embedding, models with gated feed-forward parts usually do not.
    is_tied = outside < 1.5 * bare.embedding_parameters if total == total else matrices == 2
    return ModelFacts(*(float(size) for size in sizes), bare.seq_len, tied=float(is_tied), name=row["model_name"])


def _preset(row: Row) -> ModelFacts:
    """The preset whose name is most like the row's model, else the one with the nearest number of parameters."""
    name = row["model_name"].lower().replace(" ", "-")
    known = MODELS.get(name)
    if known is None:
        total = _float(row, "params_total")
        usual = total if total > 0 else 7e9
        known = min(MODELS.values(), key=lambda model: abs(float(np.log(model.parameters / usual))))
    return replace(known, seq_len=float(_int(row, "seq_len") or np.asarray(known.seq_len)), name=row["model_name"])


def _usual_vocabulary(row: Row) -> int:
    name = row["model_name"].lower()
    if "bloom" in name:
        return 250_880
    if "nemotron" in name:
        return 256_000
    return 51_200


# -------------------------------------------------------------------------------------------------- machine and software


def _machine(row: Row, program: Program) -> Machine:
    device = device_facts(row["gpu_type"])
    node = _int(row, "gpus_per_node") or device.usual_node
    devices = max(1, _int(row, "gpus"))
    network, is_slow = _network(row["interconnect"], device, node)
    if network is None:
        network, is_slow = _network(program.fabric, device, node)
    cluster = ClusterFacts(
        device=device,
        nodes=max(1, -(-devices // node)),
        devices_per_node=node,
        network_gbs=device.usual_network_gbs if network is None else network,
        slow_fabric=is_slow,
    )
    return cluster.machine()


def _network(text: str, device: DeviceFacts, node: int) -> tuple[float | None, bool]:
    """Read bytes of network per node, in GB/s, and whether its fabric is a slow one, from an interconnect's description."""
    is_slow = bool(re.search(r"omni-?path|tcp|ethernet(?!.*roce)", text, re.IGNORECASE))
    per_gpu = re.search(r"(\d+)\s*Gb/s[^;]*per GPU", text)
    counted = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb/s", text)
    bytes_ = re.search(r"(\d+)\s*GB/s[^;]*per node", text)
    between = re.search(r"(\d+)\s*Gb/s[^;]*node", text)
    links = re.search(r"(\d+) Omni-Path links per node", text)
    if counted:
        return int(counted[1]) * int(counted[2]) / 8, is_slow
    if per_gpu:
        return int(per_gpu[1]) / 8 * node, is_slow
    if bytes_:
        return float(bytes_[1]), is_slow
    if between:
        return int(between[1]) / 8, is_slow
    if links:
        return int(links[1]) * 100 / 8, is_slow
    return None, is_slow


def _software(row: Row, program: Program) -> Software:
    notes = row["notes"].lower()
    compiled = bool(re.search(r"(?<!no )compile", notes))
    casts = "amp_bf16/default" in notes  # Composer's FSDP without a parameter dtype
    fp32_gradients = "fp32 grad" in row["precision"].lower()
    return Software(
        attention=ATTENTION.index(program.attention),
        eager=float(program.eager and not compiled),
        fp8=float("fp8" in row["precision"].lower()),
        gradient_bytes=4.0 if fp32_gradients else float(program.gradient_bytes),
        sequence_parallel=float(program.sequence_parallel),
        async_tensor=float("async" in notes),
        parameter_bytes=4.0 if casts else 2.0,
        casts=float(casts),
        early_stop=float(program.early_stop),
        collectives=float(program.collectives),
        overlaps_gradients=float(program.overlaps_gradients),
        overlaps_gathers=float(program.overlaps_gathers),
        blocking=float(program.blocking),
        logit_memory=float(program.logit_memory),
        fp32_copies=float(program.fp32_copies),
        step_bytes=float(program.step_bytes),
        bucket_bytes=program.bucket_bytes,
        dropout=float(program.attention == "unfused"),
        master_bytes=12.0 if fp32_gradients else float(program.master_bytes),
        gradient_memory=6.0 if fp32_gradients else float(program.gradient_memory or program.gradient_bytes),
        balances_stages=float(program.balances_stages),
    )


# -------------------------------------------------------------------------------------------------------------- the plan


def _plan(row: Row, program: Program) -> Plan:
    tp, cp, pp = (_int(row, name) or 1 for name in ("tp", "cp", "pp"))
    dp = max(1, _int(row, "gpus") // (tp * cp * pp))
    shard = _int(row, "dp_shard") or (1 if _int(row, "dp_replicate") else dp)
    replicate = _int(row, "dp_replicate") or max(1, dp // shard)
    zero = _int(row, "zero_stage") if row["zero_stage"] else program.zero
    told = re.search(r"micro_num (\d+)", row["notes"])
    samples = _int(row, "global_batch_sequences") or dp * (_int(row, "micro_batch") or 1) * (
        int(told[1]) if told else 1
    )
    # Blank: pipelines take single samples, except torchtitan's, which by default cut a batch into pp microbatches.
    usual = 1 if pp > 1 and not program.pp_microbatches else samples // dp // pp
    micro = _int(row, "micro_batch") or max(1, usual)
    if "sequences per chip" in row["notes"]:
        micro *= tp * cp
    micro = min(micro, max(1, samples // dp))
    interleaved = "interleaved" in row["schedule"] or _int(row, "virtual_pp") > 1
    virtual = (_int(row, "virtual_pp") or (program.virtual if interleaved else 1)) if pp > 1 else 1
    schedule = next(i for i, s in enumerate(SCHEDULES) if s.name == ("interleaved_1f1b" if virtual > 1 else "1f1b"))
    return Plan(
        *(float(size) for size in (pp, replicate, shard, cp, tp, zero, micro)),
        microbatches=max(1.0, samples / (dp * micro)),
        virtual=float(virtual),
        schedule=schedule,
        recompute=RECOMPUTE[_policy(row["activation_ckpt"], program)],
    )


def _policy(text: str, program: Program) -> str:
    text = text.lower()
    if not text:
        return program.recompute
    known = (
        ("every other", "every_2"),
        ("minimal", "minimal"),
        ("attention", "attention"),
        ("core", "attention"),
        ("selective", "selective"),
        ("full", "full"),
        ("true", "full"),
        ("yes", "full"),
    )
    return next((policy for word, policy in known if word in text), "none")


# ------------------------------------------------------------------------------------------------------ what was measured


def _published_seconds(row: Row, model: ModelFacts, plan: Plan) -> float:
    """Return the step time: as printed, or from tokens per second, or from TFLOP/s by the source's own FLOP formula."""
    if _float(row, "step_time_s") > 0:
        return _float(row, "step_time_s")
    tokens = float(plan.samples * model.seq_len)
    if _float(row, "tokens_per_s_per_gpu") > 0:
        return tokens / _float(row, "tokens_per_s_per_gpu") / _int(row, "gpus")
    rate = _float(row, "tflops_per_gpu") * 1e12
    if not rate > 0:
        rate = _float(row, "mfu_pct") / 100 * device_facts(row["gpu_type"]).peak
    flops = tokens * flops_per_token(model, row["flops_convention"])
    return flops / (rate * _int(row, "gpus")) if rate > 0 else float("nan")


def flops_per_token(model: ModelFacts, convention: str) -> float:
    """Return training FLOPs per token as a source counts them; where it does not say, as PaLM did."""
    matrices = model.layers * (model.attention_parameters + model.ffn_parameters)
    logits = model.vocab * model.hidden
    core = 12 * model.layers * model.query_width * model.seq_len
    if convention.startswith("sc21"):
        h, length, layers, vocab = model.hidden, model.seq_len, model.layers, model.vocab
        return float(96 * layers * h**2 * (1 + length / (6 * h) + vocab / (16 * layers * h)))
    if "incl_emb" in convention:
        return float(6 * (matrices + logits * (2 - model.tied)) + core)
    if "causal" in convention:
        return float(6 * (matrices + logits) + core / 2)
    return float(6 * (matrices + logits) + core)


def _int(row: Row, name: str) -> int:
    value = _float(row, name)
    return 0 if value != value else int(value)


def _float(row: Row, name: str) -> float:
    try:
        return float(row.get(name) or "nan")
    except ValueError:
        return float("nan")


# ------------------------------------------------------------------------------------------------- many runs, as one table


@dataclass(frozen=True)
class Table:
    """Several runs as columns, so that one call predicts them all."""

    model: ModelFacts
    machine: Machine
    software: Software
    plan: Plan


def read_table(path: str | Path) -> tuple[list[Run], Table]:
    """Read a CSV file; return its runs, and the same as columns."""
    runs = read_runs(path)
    return runs, table_of(runs)


def table_of(runs: Iterable[Run]) -> Table:
    """Return runs as columns."""
    runs = list(runs)
    parts = [[getattr(run, name) for run in runs] for name in ("model", "machine", "software", "plan")]
    return Table(*(_columns(part) for part in parts))


def _columns(facts: list[Any]) -> Any:
    first = facts[0]
    columns: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(each, field.name) for each in facts]
        if isinstance(values[0], Recompute):
            columns[field.name] = _columns(values)
        elif not isinstance(values[0], str):
            columns[field.name] = None if values[0] is None else _array(values)
    return type(first)(**columns)


def _array(values: list[Any]) -> NDArray[np.float64]:
    return np.array([float(value) for value in values])
