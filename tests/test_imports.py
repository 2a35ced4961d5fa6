"""What our files may import and name: nothing heavy at import, no private torch names, nothing of one machine."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRIVATE_TORCH = "lightning_4d/_torch_private.py"
HEAVY = ("transformers", "matplotlib", "tensorboard")

# Files and folders that stand on fewer packages than the rest. A folder that does not exist yet has no files to fail.
FORBIDDEN_IMPORTS = {
    "lightning_4d/layout.py": ("torch", "lightning", "numpy"),
    "lightning_4d/errors.py": ("torch", "lightning", "numpy"),
    "lightning_4d/mesh.py": ("lightning",),
    "lightning_4d/parallel": ("lightning",),
    "lightning_4d/utilization": ("lightning", "torch.distributed"),
    "lightning_4d/planner": ("lightning", "torch.distributed"),
}


def _product_files() -> list[Path]:
    tops = ("lightning_4d", "callbacks", "examples")
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- import lightning_4d is light ------------------------------------------------------------------------------------


def test_import_loads_nothing_heavy_and_no_callbacks(tmp_path: Path) -> None:
    """Empty stand-ins make a heavy import visible also where the real package is not installed."""
    for name in HEAVY:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    program = f"""
        import json, sys
        import lightning.pytorch, torchmetrics  # what they load is not ours
        before = set(sys.modules)
        sys.path.append({str(tmp_path)!r})  # last: a real package is found first
        import lightning_4d
        print(json.dumps(sorted(set(sys.modules) - before)))
    """
    command = (sys.executable, "-c", textwrap.dedent(program))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "lightning_4d" in loaded
    unwanted = (*HEAVY, "lightning_4d.callbacks")
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{start}." for start in unwanted))] == []


# -- imports by file --------------------------------------------------------------------------------------------------


def _imported(tree: ast.AST) -> Iterator[str]:
    """Every absolute dotted name that a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _offending_imports(source: str, forbidden: tuple[str, ...]) -> list[str]:
    starts = tuple(f"{name}." for name in forbidden)
    return [name for name in _imported(ast.parse(source)) if f"{name}.".startswith(starts)]


@pytest.mark.parametrize("place", FORBIDDEN_IMPORTS)
def test_low_layers_stand_on_few_packages(place: str) -> None:
    top = ROOT / place
    files = [top] if top.is_file() else list(top.rglob("*.py"))
    found = {_name(file): _offending_imports(file.read_text(), FORBIDDEN_IMPORTS[place]) for file in files}
    assert not {name: names for name, names in found.items() if names}


def test_offending_imports_are_found() -> None:
    source = "import torch.nn as nn\ndef f():\n    from torch import distributed\nimport torchmetrics\n"
    assert _offending_imports(source, ("torch",)) == ["torch.nn", "torch", "torch.distributed"]
    assert _offending_imports(source, ("torch.distributed",)) == ["torch.distributed"]


# -- private torch names ----------------------------------------------------------------------------------------------


def _is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def _torch_aliases(tree: ast.AST) -> dict[str, str]:
    """Local name -> the torch module or object that it stands for."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.split(".")[0] == "torch":
                    aliases[item.asname or "torch"] = item.name if item.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
    return aliases


def _dotted(node: ast.expr) -> str | None:
    """``a.b.c`` as text, or None where the chain does not start at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _private_torch_names(source: str) -> set[str]:
    tree = ast.parse(source)
    names = {name for name in _imported(tree) if _is_private(name)}
    aliases = _torch_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := _dotted(node)):
            first, _, rest = chain.partition(".")
            if first in aliases and _is_private(f"{aliases[first]}.{rest}"):
                names.add(f"{aliases[first]}.{rest}")
    return names


def test_private_torch_names_have_one_home() -> None:
    found = {_name(path): _private_torch_names(path.read_text()) for path in _product_files()}
    found.pop(PRIVATE_TORCH, None)
    assert not {name: names for name, names in found.items() if names}, f"move these to {PRIVATE_TORCH}"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import x",
        "from torch.distributed._composable import x",
        "from torch.distributed.tensor import _random",
        "import torch._dynamo",
        "import torch\ntorch._foreach_norm([])",
        "import torch.distributed as dist\ndist._functional_collectives.all_reduce",
        "from torch.distributed import tensor as dt\ndef f():\n    return dt.DTensor._spec",
    ],
)
def test_private_torch_names_are_found(source: str) -> None:
    assert _private_torch_names(source)


@pytest.mark.parametrize("source", ["import torch\ntorch.__version__", "x = self._spec", "import numpy\nnumpy._core"])
def test_other_private_names_are_not_meant(source: str) -> None:
    assert not _private_torch_names(source)


# -- nothing of one machine -------------------------------------------------------------------------------------------

_HOSTS = ("pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".org", "download.pytorch" + ".org", "debian" + ".org")
_OF_ONE_MACHINE = re.compile(
    r"(?<![\w.$}])/(?:home|Users|root|work)/[\w.-]+" + "|" + "|".join(re.escape(host) for host in _HOSTS)
)


def _text_files() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(
        ("git", "ls-files", "-z"),
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            yield name, data.decode(errors="replace")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: nothing is tracked")
def test_files_name_no_machine_and_no_registry() -> None:
    found = {name: _OF_ONE_MACHINE.findall(text) for name, text in _text_files()}
    assert len(found) > 10
    assert not {name: hits for name, hits in found.items() if hits}


@pytest.mark.parametrize(
    "text", ['open("/' + 'home/someone/x")', "cd /" + "root/.cache", "https://" + _HOSTS[0] + "/simple"]
)
def test_machine_and_registry_names_are_found(text: str) -> None:
    assert _OF_ONE_MACHINE.search(text)
