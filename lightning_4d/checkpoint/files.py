"""Where checkpoints are on disk, and how one replaces another so that a crash leaves a whole one.

A checkpoint is written as ``NAME.partial`` beside its final ``NAME``, and takes that name when it is complete. Where
``NAME`` exists, the two are exchanged in one step if the system can do that; else the old one is ``NAME.old`` for a
moment, and :func:`locate` falls back to it.
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lightning_4d.errors import CheckpointError, explain

META = "meta.pt"
_DCP = ".metadata"  # what torch.distributed.checkpoint writes last
PARTIAL = ".partial"
OLD = ".old"

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h


class CheckpointKind(enum.Enum):
    """What a path holds."""

    FOLDER = "folder"
    FILE = "file"
    MISSING = "missing"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL of something else than the local file system."""
    scheme = urlsplit(os.fspath(path)).scheme
    return "://" in os.fspath(path) and scheme not in ("file", "local")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a local path; ``file://`` URLs are understood.

    Raises:
        CheckpointError: ``path`` is remote.
    """
    text = os.fspath(path)
    if is_remote(text):
        raise CheckpointError(
            explain(
                f"a checkpoint folder at {text!r}",
                "a distributed checkpoint needs a file system that all ranks mount",
                "use a local or shared path, or save_distributed_checkpoint=False for a single file at a URL",
            )
        )
    return Path(unquote(text.split("://", 1)[1])) if "://" in text else Path(text)


def partial(path: Path) -> Path:
    """Where ``path`` is written before it is complete."""
    return path.with_name(path.name + PARTIAL)


def _old(path: Path) -> Path:
    return path.with_name(path.name + OLD)


def checkpoint_kind(path: str | os.PathLike[str]) -> CheckpointKind:
    """Tell what ``path`` holds, after :func:`locate`'s fall-back. Remote paths are taken for files."""
    if is_remote(path):
        return CheckpointKind.FILE
    found = _fallback(local_path(path))
    if found.is_dir():
        return CheckpointKind.FOLDER
    return CheckpointKind.FILE if found.is_file() else CheckpointKind.MISSING


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the complete checkpoint that stands for ``path``.

    Raises:
        CheckpointError: there is none, or ``path`` is one whose writing was interrupted.
    """
    asked = local_path(path)
    found = _fallback(asked)
    if found.name.endswith(PARTIAL):
        raise CheckpointError(
            explain(
                f"{str(asked)!r}",
                f"a name that ends in {PARTIAL!r} is a checkpoint whose writing was interrupted",
                f"load {str(asked.with_name(asked.name.removesuffix(PARTIAL)))!r}, or an earlier checkpoint",
            )
        )
    missing = [name for name in (META, _DCP) if found.is_dir() and not (found / name).is_file()]
    if missing:
        raise CheckpointError(
            explain(
                f"{str(found)!r} holds no {' and no '.join(missing)}",
                f"a distributed checkpoint is a folder with {_DCP} and {META}, written last and removed first",
                "give a folder that a Trainer wrote completely",
            )
        )
    if not found.exists():
        raise CheckpointError(
            explain(f"{str(asked)!r}", "no such checkpoint exists", f"see what {str(asked.parent)!r} holds")
        )
    return found


def _fallback(path: Path) -> Path:
    return _old(path) if not path.exists() and _old(path).exists() else path


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a local checkpoint, file, link or folder, with anything that an interrupted save left beside it."""
    target = local_path(path)
    for each in (_old(target), partial(target), target):  # the old one first: loading would fall back to it
        _remove(each)


def remove_partial(path: Path) -> None:
    """Remove what a failed save of ``path`` has written so far."""
    _remove(partial(path))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        (path / META).unlink(missing_ok=True)  # first: half a folder must never look like a whole one
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prepare_partial(path: Path, *, folder: bool) -> Path:
    """Make room for writing ``path``; return where to write. Run by one rank only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() and _old(path).exists():
        os.rename(_old(path), path)  # an earlier save was interrupted between its two renames
    _remove(partial(path))
    if folder:
        partial(path).mkdir()
    return partial(path)


def commit(path: Path) -> None:
    """Give the complete ``NAME.partial`` its final name, whatever has that name now. Run by one rank only."""
    written = partial(path)
    if written.is_dir():
        _synchronize(written)
    if not os.path.lexists(path):
        os.rename(written, path)
    elif _exchange(written, path):
        _remove(written)  # now the previous checkpoint
    elif written.is_file() and not path.is_dir():
        os.replace(written, path)
    else:
        _remove(_old(path))
        os.rename(path, _old(path))
        os.rename(written, path)
    _synchronize(path.parent)
    _remove(_old(path))


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step, where Linux and the file system can."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE)) == 0


def _synchronize(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power failure."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
