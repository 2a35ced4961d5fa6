"""``callbacks/`` is the package ``lightning_4d.callbacks`` however the project is used: checkout, wheel or sdist."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINK = ROOT / "lightning_4d" / "callbacks"


def _setuptools_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def _environment(**changes: str) -> dict[str, str]:
    """This process's environment without what could make Python find the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | changes


def _package_folders(top: Path, name: str) -> set[str]:
    """The dotted names of ``top`` and the folders below it that hold Python files; links are not followed."""
    folders = {path.parent for path in top.rglob("*.py") if "__pycache__" not in path.parts}
    return {".".join((name, *folder.relative_to(top).parts)) for folder in folders}


def _source_files(top: Path, name: str) -> set[str]:
    """The files of a package as a wheel names them."""
    return {str(PurePosixPath(name, *path.relative_to(top).parts)) for path in top.rglob("*.py")}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist, built without network from a copy of the sources (a build leaves files beside them)."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    leave_out = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "logs", "runs", "checkpoints"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=leave_out)
    return _build(source, tmp_path_factory.mktemp("dist"), "--wheel", "--sdist")


def _build(source: Path, target: Path, *what: str) -> tuple[Path, ...]:
    command = (sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(target), str(source))
    done = _run(*command, cwd=target, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    suffixes = {"--wheel": "*.whl", "--sdist": "*.tar.gz"}
    return tuple(next(target.glob(suffixes[kind])) for kind in what)


def _wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def _module_files(wheel: Path) -> set[str]:
    """What the wheel installs, without its own description."""
    return {name for name in _wheel_files(wheel) if ".dist-info/" not in name}


def test_package_list_equals_the_folders_on_disk() -> None:
    folders = _package_folders(ROOT / "lightning_4d", "lightning_4d") | _package_folders(
        ROOT / "callbacks", "lightning_4d.callbacks"
    )
    listed = _setuptools_table()["packages"]
    assert sorted(listed) == sorted(folders), (
        "add the folder to [tool.setuptools] packages in pyproject.toml, or remove it"
    )


def test_every_package_folder_has_an_init_file() -> None:
    for name in _setuptools_table()["packages"]:
        folder = ROOT.joinpath(*name.split("."))
        assert (folder / "__init__.py").is_file(), f"{name} would be a namespace package: add {folder / '__init__.py'}"


def test_package_dir_maps_only_the_callbacks() -> None:
    assert _setuptools_table()["package-dir"] == {"lightning_4d.callbacks": "callbacks"}


def test_link_is_relative_and_points_to_the_folder() -> None:
    assert LINK.is_symlink()
    assert os.readlink(LINK) == os.path.join("..", "callbacks")
    assert LINK.resolve() == ROOT / "callbacks"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: nothing is tracked")
def test_link_is_tracked_as_a_link() -> None:
    listed = _run("git", "ls-files", "-s", "lightning_4d/callbacks", cwd=ROOT).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["120000"]


def test_wheel_holds_every_source_file_once(distributions: tuple[Path, Path]) -> None:
    names = _wheel_files(distributions[0])
    assert len(names) == len(set(names))
    expected = _source_files(ROOT / "lightning_4d", "lightning_4d") | _source_files(
        ROOT / "callbacks", "lightning_4d/callbacks"
    )
    assert _module_files(distributions[0]) == expected | {"lightning_4d/py.typed"}


def test_wheel_has_one_top_level_package(distributions: tuple[Path, Path]) -> None:
    tops = {name.split("/")[0] for name in _wheel_files(distributions[0]) if ".dist-info" not in name.split("/")[0]}
    assert tops == {"lightning_4d"}


def test_sdist_builds_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = distributions
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    (tmp_path / "dist").mkdir()
    (rebuilt,) = _build(unpacked, tmp_path / "dist", "--wheel")
    assert rebuilt.name == wheel.name
    assert sorted(_wheel_files(rebuilt)) == sorted(_wheel_files(wheel))
    with zipfile.ZipFile(rebuilt) as ours, zipfile.ZipFile(wheel) as theirs:
        different = [name for name in _module_files(wheel) if ours.read(name) != theirs.read(name)]
    assert not different


def test_unpacked_wheel_works_elsewhere(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(distributions[0]) as archive:
        archive.extractall(site)
    # The checkout may be installed in this environment as an editable package: the path given here comes first, and the
    # import hooks of editable installs are taken off.
    program = """
import importlib.metadata, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__name__", "").lower()]
import lightning_4d, lightning_4d.callbacks
print(lightning_4d.__file__)
print(lightning_4d.callbacks.__file__)
print(lightning_4d.__version__ == importlib.metadata.version("lightning-4d"))
"""
    done = _run(sys.executable, "-c", program, cwd=empty, env=_environment(PYTHONPATH=str(site)))
    assert done.returncode == 0, done.stderr
    package, callbacks, same_version = done.stdout.splitlines()[-3:]
    assert Path(package) == site / "lightning_4d" / "__init__.py"
    assert Path(callbacks) == site / "lightning_4d" / "callbacks" / "__init__.py"
    assert same_version == "True"


def test_entry_point_names_an_existing_function(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(name).decode()
    assert "lightning-4d = lightning_4d.cli:main" in text
    assert callable(importlib.import_module("lightning_4d.cli").main)


def test_importing_the_folder_by_its_own_name_is_refused() -> None:
    done = _run(sys.executable, "-c", "import callbacks", cwd=ROOT, env=_environment())
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "from lightning_4d.callbacks import" in done.stderr


def test_callbacks_of_the_checkout_are_loaded_through_the_link() -> None:
    package = importlib.import_module("lightning_4d.callbacks")
    assert package.__file__ is not None
    assert Path(package.__file__).resolve() == ROOT / "callbacks" / "__init__.py"
