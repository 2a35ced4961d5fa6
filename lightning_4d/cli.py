"""The console script ``lightning-4d``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_4d._version import __version__
from lightning_4d.errors import Lightning4DError


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
    return parser


def _consolidate(options: argparse.Namespace) -> None:
    from rich.console import Console

    from lightning_4d.checkpoint import consolidate

    console = Console(stderr=True)
    with console.status(f"consolidating {options.folder}"):
        consolidate(options.folder, options.file, weights_only=options.weights_only)
    console.print(f"wrote {options.file}")


if __name__ == "__main__":
    sys.exit(main())
