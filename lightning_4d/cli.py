"""The console script ``lightning-4d``."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_4d._version import __version__
from lightning_4d.errors import Lightning4DError, PlanError, UnsupportedError, explain
from lightning_4d.layout import ParallelLayout

if TYPE_CHECKING:
    from lightning_4d.planner import ClusterFacts, Limits, ModelFacts, Search


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 1 after an error that is explained on standard error."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (Lightning4DError, OSError) as error:
        print(f"lightning-4d {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-4d", description="Tools for lightning_4d.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    consolidate = commands.add_parser(
        "consolidate",
        help="turn a distributed checkpoint folder into one ordinary .ckpt file",
        description="Turn a distributed checkpoint folder into one ordinary Lightning .ckpt file, which "
        "LightningModule.load_from_checkpoint and any Trainer open without lightning_4d.",
    )
    consolidate.add_argument("folder", help="the checkpoint folder that a Trainer wrote")
    consolidate.add_argument("file", help="the file to write; an existing one is replaced when the new one is complete")
    consolidate.add_argument(
        "--weights-only", action="store_true", help="refuse to unpickle anything but plain data (untrusted folders)"
    )
    consolidate.set_defaults(run=_consolidate)
    _add_explain(commands)
    _add_plan(commands)
    _add_draw(commands)
    _add_rehearse(commands)
    return parser


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say how a model would be divided over ranks, and what that communicates",
        description="Build a model and say how it would be divided over ranks, and why. Nothing is computed: it runs "
        "on fake tensors, on one process.",
    )
    parser.add_argument("class_path", help="the model's class, such as my_package.models.GPT")
    parser.add_argument("--init-args", default="{}", help="arguments of the class as JSON, such as '{\"dim\": 64}'")
    parser.add_argument("--blocks", default="auto", help="the container of the repeated layers")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--tensor-parallel-plan", default="auto", help='"auto", or {pattern: style} as JSON')
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="ranks that hold stages of the blocks")
    parser.add_argument("--pipeline-schedule", default="1f1b")
    parser.add_argument("--pipeline-split", default="auto", help='"auto", or first blocks: blocks.4,blocks.8')
    parser.set_defaults(run=_explain)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the fastest layout that fits, and say why",
        description="Predict memory and step time of every legal layout of a model on a cluster; print the best ones, "
        "why the others were not taken, and what the usual recipe says. Nothing runs on a device.",
    )
    model = plan.add_argument_group("model")
    model.add_argument("--model", help="a preset (llama3-8b, ...), a YAML file of sizes, or a Hugging Face config.json")
    model.add_argument("--class-path", help="a LightningModule to be counted on fake tensors, e.g. my.models.GPT")
    model.add_argument("--init-args", default="{}", help="its arguments, as YAML: '{dim: 128, n_layers: 4}'")
    model.add_argument("--batch-shape", help="its batch: int64:8x128,int64:8x128 for two tensors of 8 samples")
    model.add_argument("--blocks", default="auto", help="the dotted name of its repeated blocks")
    model.add_argument("--seq-len", type=int, help="tokens of a sample, if not the model's own")
    cluster = plan.add_argument_group("cluster")
    cluster.add_argument("--cluster", required=True, help="a preset, a device's name (H100), a YAML file, or local-cpu")
    cluster.add_argument("--devices", type=int, help="how many devices; by default all of the cluster")
    cluster.add_argument("--matmul-tflops", type=float, help="measured rate of a large 16-bit matrix product")
    cluster.add_argument("--link-gbs", type=float, help="measured bandwidth of a collective inside a node, per device")
    cluster.add_argument("--node-network-gbs", type=float, help="measured bandwidth across nodes, per node")
    run = plan.add_argument_group("run")
    run.add_argument("--batch", type=int, required=True, help="samples of a step, of all devices together")
    run.add_argument("--precision", default=None, help="bf16-mixed (default), 16-mixed, bf16-true or 32-true")
    run.add_argument("--compile", action="store_true", help="blocks are compiled")
    run.add_argument("--layout", help="only this layout, e.g. pp2.dp2x4.cp1.tp8")
    run.add_argument("--micro-batch", type=int, help="only this microbatch")
    run.add_argument("--schedule", action="append", help="only this pipeline schedule; may be given several times")
    run.add_argument("--recompute", action="append", help="only this checkpointing policy; may be given several times")
    out = plan.add_argument_group("output")
    out.add_argument("--top", type=int, default=8, help="how many layouts to list")
    out.add_argument("--output", help="a YAML file for LightningCLI: strategy, callbacks, precision")
    out.add_argument("--batch-key", help="the option that sets the loader's batch size, e.g. data.batch_size")
    out.add_argument("--pictures", help="a folder for pictures: memory, time, schedule, mesh")
    out.add_argument("--format", choices=("png", "svg"), default="png", help="of the pictures")
    plan.set_defaults(run=_plan)


def _add_draw(commands: Any) -> None:
    draw = commands.add_parser(
        "draw",
        help="draw where the ranks of a layout sit, or a pipeline schedule",
        description="Draw which ranks of a layout share a node, and along which axes they communicate; with --schedule "
        "a pipeline schedule. As text, or as PNG or SVG.",
    )
    draw.add_argument("--layout", required=True, help="e.g. pp2.dp2x2.cp2.tp2")
    draw.add_argument("--gpus-per-node", type=int, default=8)
    draw.add_argument("--schedule", help="a pipeline schedule, e.g. 1f1b, interleaved_1f1b, zbv")
    draw.add_argument("--microbatches", type=int, default=8)
    draw.add_argument("--chunks", type=int, default=2, help="stages of each rank, of interleaved schedules")
    draw.add_argument("--output", nargs="+", help="PNG, SVG or text files (.txt); without any the text form is printed")
    draw.set_defaults(run=_draw)


def _add_rehearse(commands: Any) -> None:
    parser = commands.add_parser(
        "rehearse",
        help="set up one rank of a layout of any size here, and say what it holds and communicates",
        description="Set up one rank of a layout in this process, by the mechanisms of a real run but without other "
        "ranks and without memory for tensors; print its parameters, gradients, optimizer states and activations, and "
        "the collectives of one step by axis.",
    )
    parser.add_argument("--model", required=True, help="a Llama preset (llama3-405b, ...) or package.module:Class")
    parser.add_argument("--init-args", default="{}", help="arguments of the class as JSON, such as '{\"dim\": 64}'")
    parser.add_argument("--layout", required=True, help="e.g. pp16.dp1x128.cp1.tp8")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--seq-len", type=int, help="of a preset: tokens of a sample, if not the model's own")
    parser.add_argument("--batch", type=int, help="of a preset: samples of a data-parallel rank and step; default pp")
    parser.add_argument("--batch-shape", help="of a class: its batch, e.g. int64:8x128; default its loader's")
    parser.add_argument("--precision", default="bf16-mixed", help="the Trainer's")
    parser.add_argument("--blocks", default="auto", help="the container of the repeated layers")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--context-parallel-attention", default="ring", choices=("ring", "ulysses", "hybrid"))
    parser.add_argument("--pipeline-schedule", default="1f1b")
    parser.add_argument("--num-microbatches", type=int, help="of pipeline stages; default as many as suit the schedule")
    parser.add_argument("--recompute", default="none", help="policy of activation checkpointing")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_rehearse)


def _plan(options: argparse.Namespace) -> None:
    from rich.console import Console

    from lightning_4d.planner import print_report, search, trainer_yaml
    from lightning_4d.planner.sources import LOCAL_CPU

    is_cpu = options.cluster.lower() == LOCAL_CPU
    precision = options.precision or ("32-true" if is_cpu else "bf16-mixed")
    model, cluster, limits = _model(options), _cluster(options), _limits(options)
    found = search(model, cluster, options.batch, precision=precision, compiled=options.compile, limits=limits)
    console = Console()
    print_report(found, console, options.top)
    if options.output:
        accelerator = "cpu" if is_cpu else "tpu" if "TPU" in cluster.device.name else "gpu"
        text = trainer_yaml(found.best, cluster, precision, accelerator, options.batch_key, compiled=options.compile)
        Path(options.output).write_text(text)
        console.print(f"wrote {options.output}")
    if options.pictures:
        for path in _draw_plan(found, Path(options.pictures), options.format):
            console.print(f"wrote {path}")


def _model(options: argparse.Namespace) -> ModelFacts:
    from lightning_4d.planner.sources import model_facts

    if (options.model is None) is (options.class_path is None):
        given = "--model and --class-path" if options.model else "no model"
        raise PlanError(explain(given, "a plan is for one model", "give either --model or --class-path"))
    if options.seq_len is not None and options.seq_len < 1:
        raise PlanError(explain(f"--seq-len {options.seq_len}", "a sample has tokens", "use --seq-len 1024"))
    facts = model_facts(options.model) if options.model else _counted(options)
    return facts if options.seq_len is None else replace(facts, seq_len=options.seq_len)


def _counted(options: argparse.Namespace) -> ModelFacts:
    import yaml

    from lightning_4d.parallel.blocks import find_blocks
    from lightning_4d.planner.counted import build_module, count_module, parse_batch

    if options.batch_shape is None:
        rule = "a step is counted with the shapes of a batch"
        raise PlanError(explain("--class-path without --batch-shape", rule, "add --batch-shape int64:8x128"))
    sys.path.insert(0, "")  # modules in the folder where the command runs
    module = build_module(options.class_path, yaml.safe_load(options.init_args) or {})
    blocks = {block.name: block.module for block in find_blocks(module, options.blocks)}
    return count_module(module, parse_batch(options.batch_shape), blocks, options.class_path.rpartition(".")[2])


def _cluster(options: argparse.Namespace) -> ClusterFacts:
    from lightning_4d.planner.sources import cluster_facts

    cluster = cluster_facts(options.cluster, options.devices)
    for name in ("matmul_tflops", "link_gbs", "node_network_gbs"):
        if (value := getattr(options, name)) is not None and value <= 0:
            option = "--" + name.replace("_", "-")
            raise PlanError(explain(f"{option} {value:g}", "a measured rate is above 0", f"leave {option} out"))
    return replace(
        cluster,
        matmul_tflops=options.matmul_tflops or cluster.matmul_tflops,
        measured_link_gbs=options.link_gbs or cluster.measured_link_gbs,
        measured_network_gbs=options.node_network_gbs or cluster.measured_network_gbs,
    )


def _limits(options: argparse.Namespace) -> Limits:
    from lightning_4d.planner import Limits

    limits = Limits(micro_batch=options.micro_batch)
    if options.layout:
        limits = replace(limits, **ParallelLayout.parse(options.layout).axis_sizes)
    if options.schedule:
        limits = replace(limits, schedules=tuple(options.schedule))
    return replace(limits, policies=tuple(options.recompute)) if options.recompute else limits


def _draw_plan(found: Search, folder: Path, suffix: str) -> list[Path]:
    from lightning_4d.planner import timeline
    from lightning_4d.visual import Cell, draw_memory, draw_mesh, draw_schedule, draw_time

    best, top = found.best, found.top(6)
    names = [f"{each.layout}\n{each.policy}, micro-batch {each.micro_batch}" for each in top]
    paths = [folder / f"{name}.{suffix}" for name in ("memory", "time", "mesh", "schedule")]
    draw_memory(names, [each.memory for each in top], best.capacity, paths[0])
    draw_time(names, [each.parts for each in top], paths[1])
    draw_mesh(best.layout, found.cluster.devices_per_node, paths[2])
    if not best.schedule:
        return paths[:3]
    pp = best.layout.pipeline_parallel_size
    work = timeline(best.schedule, pp, min(best.microbatches, 2 * pp), best.virtual)
    draw_schedule([Cell(*each) for each in work], paths[3], f"{best.schedule}, {pp} ranks")
    return paths


def _draw(options: argparse.Namespace) -> None:
    text, draw = _drawn(options)
    if not options.output:
        print(text())
    for output in map(Path, options.output or ()):
        if output.suffix.lower() == ".txt":
            output.write_text(text() + "\n")
        else:
            draw(output)
        print(f"wrote {output}")


def _drawn(options: argparse.Namespace) -> tuple[Callable[[], str], Callable[[Path], None]]:
    """Return what makes the text form, and what makes the picture."""
    from lightning_4d.planner import timeline
    from lightning_4d.visual import Cell, draw_mesh, draw_schedule, mesh_text, schedule_text

    layout, per_node = ParallelLayout.parse(options.layout), options.gpus_per_node
    if not options.schedule:
        return lambda: mesh_text(layout, per_node), lambda path: draw_mesh(layout, per_node, path)
    work = timeline(options.schedule, layout.pipeline_parallel_size, options.microbatches, options.chunks)
    cells = [Cell(*each) for each in work]
    return lambda: schedule_text(cells), lambda path: draw_schedule(cells, path, options.schedule)


def _rehearse(options: argparse.Namespace) -> None:
    from rich.console import Console

    from lightning_4d.parallel.recompute import RecomputePolicy
    from lightning_4d.rehearsal import RehearsalOptions, print_rehearsal, rehearse

    layout = ParallelLayout.parse(options.layout)
    chosen = RehearsalOptions(
        blocks=options.blocks,
        pipeline_schedule=options.pipeline_schedule,
        num_microbatches=options.num_microbatches or "auto",
        sequence_parallel=options.sequence_parallel,
        context_parallel_attention=options.context_parallel_attention,
        recompute=RecomputePolicy(options.recompute),
        precision=options.precision,
        gpus_per_node=options.gpus_per_node,
    )
    found = rehearse(_builder(options, layout), layout, options.rank, chosen, _batch_of(options))
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print_rehearsal(found, Console(width=None if sys.stdout.isatty() else 120))


def _builder(options: argparse.Namespace, layout: ParallelLayout) -> Callable[[], Any]:
    """Return what makes the model: a Llama of a preset's sizes, or the user's class."""
    from lightning_4d.planner.presets import MODELS
    from lightning_4d.rehearsal import Llama, LlamaSizes

    facts = MODELS.get(options.model)
    if facts is None:
        return lambda: _build(options.model.replace(":", "."), options.init_args)
    if facts.ffn_matrices != 3 or facts.positions:
        known = ", ".join(name for name, one in MODELS.items() if one.ffn_matrices == 3 and not one.positions)
        raise UnsupportedError(explain(f"--model {options.model}", f"presets to rehearse are {known}", "name a class"))
    counts = (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.ffn_hidden, facts.vocab)
    sizes = LlamaSizes(*(int(count) for count in counts), tied=bool(facts.tied))
    batch = options.batch or layout.pipeline_parallel_size
    return lambda: Llama(sizes, options.seq_len or int(facts.seq_len), batch)


def _batch_of(options: argparse.Namespace) -> Any:
    if options.batch_shape is None:
        return None
    import torch

    from lightning_4d.planner.counted import parse_batch

    # Of one element each, seen in the shape that is asked for.
    tensors = [torch.zeros((), dtype=dtype).expand(shape) for dtype, shape in parse_batch(options.batch_shape)]
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _consolidate(options: argparse.Namespace) -> None:
    from rich.console import Console

    from lightning_4d.checkpoint import consolidate

    console = Console(stderr=True)
    with console.status(f"consolidating {options.folder}"):
        consolidate(options.folder, options.file, weights_only=options.weights_only)
    console.print(f"wrote {options.file}")


def _explain(options: argparse.Namespace) -> None:
    module = _build(options.class_path, options.init_args)
    for section in (_explain_stages, _explain_tensor_parallelism):
        section(module, options)


def _build(class_path: str, init_args: str) -> Any:
    """Make an instance of the class, as ``python -m`` would find it from the working directory."""
    module_name, _, class_name = class_path.rpartition(".")
    sys.path.insert(0, "")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedError(
            explain(
                f"the class {class_path!r} cannot be imported ({error})",
                "a class path is what an import statement takes, seen from the working directory",
                "give package.module.Class",
            )
        ) from error
    finally:
        sys.path.remove("")
    try:
        return cls(**json.loads(init_args))
    except (json.JSONDecodeError, TypeError) as error:
        raise UnsupportedError(
            explain(f"--init-args {init_args}", str(error), f"give the arguments of {class_name} as a JSON object")
        ) from error


def _explain_stages(module: Any, options: argparse.Namespace) -> None:
    if options.pipeline_parallel_size == 1:
        return
    from rich.console import Console
    from rich.table import Table

    from lightning_4d.strategies.explain_pipeline import explain_stages

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # which devices there are says nothing here
    split = options.pipeline_split if options.pipeline_split == "auto" else options.pipeline_split.split(",")
    stages = explain_stages(module, options.pipeline_parallel_size, options.pipeline_schedule, split, options.blocks)
    parameters, flops = sum(stage.parameters for stage in stages), sum(stage.flops for stage in stages)
    table = Table(title=f"{len(stages)} stages by {options.pipeline_schedule}", title_justify="left")
    for column in ("stage", "rank", "blocks", "parameters", "forward FLOPs", "sends, elements"):
        table.add_column(column, justify="left" if column == "blocks" else "right")
    for stage in stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            f"{stage.first} to {stage.last}",
            f"{stage.parameters:,} ({stage.parameters / parameters:.1%})",
            f"{stage.flops:.3g} ({stage.flops / flops:.1%})",
            f"{stage.sends:,}",
        )
    Console().print(table)


def _explain_tensor_parallelism(module: Any, options: argparse.Namespace) -> None:
    if options.tensor_parallel_size == 1:
        return
    from rich.console import Console
    from rich.table import Table

    from lightning_4d.parallel import tensor
    from lightning_4d.parallel.blocks import find_blocks

    blocks, size, given = (
        find_blocks(module, options.blocks),
        options.tensor_parallel_size,
        options.tensor_parallel_plan,
    )
    if given == "auto":
        plan = tensor.find_plan(module, blocks, size)
    else:
        plan = tensor.explicit_plan(module, json.loads(given), size)
    rows = tensor.divisions(module, plan)
    table = Table("module", "style", "shape of one rank's part", "why", title=f"tensor parallelism over {size} ranks")
    for row in rows:
        shapes = ", ".join(f"{name} {_shape(local)} of {_shape(whole)}" for name, (whole, local) in row.shapes.items())
        table.add_row(row.name + (f" (x{row.count})" if row.count > 1 else ""), row.style, shapes, row.why)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(f"plan: {plan.source}; {tensor.whole_fraction(rows):.1%} of the parameters are whole on every rank")
    for block in tensor.block_collectives(module, blocks, plan, sequence_parallel=options.sequence_parallel):
        console.print(_collectives(block), highlight=False)


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _collectives(block: Any) -> str:
    name = f"block {block.name or '(the whole model)'}" + (f" and {block.count - 1} like it" if block.count > 1 else "")
    if block.error is not None:
        return f"{name}: collectives unknown: {block.error}"
    counts = [
        f"{phase} " + (", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none")
        for phase, kinds in (("forward", block.forward), ("backward", block.backward))
    ]
    gathered = [f"; whole tensors for {what}" for what in block.gathered]
    return f"{name}: collectives {'; '.join(counts)}{''.join(gathered)}"


if __name__ == "__main__":
    sys.exit(main())
