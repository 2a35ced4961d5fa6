"""The console script ``lightning-4d``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_4d._version import __version__
from lightning_4d.errors import Lightning4DError, UnsupportedError, explain


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
    parser.set_defaults(run=_explain)


def _consolidate(options: argparse.Namespace) -> None:
    from rich.console import Console

    from lightning_4d.checkpoint import consolidate

    console = Console(stderr=True)
    with console.status(f"consolidating {options.folder}"):
        consolidate(options.folder, options.file, weights_only=options.weights_only)
    console.print(f"wrote {options.file}")


def _explain(options: argparse.Namespace) -> None:
    module = _build(options.class_path, options.init_args)
    for section in (_explain_tensor_parallelism,):
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
