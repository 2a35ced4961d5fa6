"""Run all benchmarks, or one: ``python -m tests.benchmarks [NAME [OPTION ...]]``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

SUPPORT = {"__init__", "__main__", "report"}


def main() -> None:
    available = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in SUPPORT)
    name, options = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else (None, [])
    if name is not None and name not in available:
        raise SystemExit(f"no benchmark {name!r}; there are {', '.join(available)}")
    for each in available if name is None else [name]:
        importlib.import_module(f"tests.benchmarks.{each}").main(options)


if __name__ == "__main__":
    main()
