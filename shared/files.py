"""Files that appear whole or not at all, and digests of files.

Everything the product writes goes through `replacing`: a temporary name in the same folder, fsync,
rename, fsync of the folder. A killed process leaves a `.tmp-*` file, never a half-written result.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; on success it takes the place of `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}-{path.name}")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Remove the `.tmp-*` files of killed writers: those that nobody has touched for a day."""
    for path in folder.glob(".tmp-*"):
        if path.is_file() and time.time() - path.stat().st_mtime > 86400:
            path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256_files(paths: list[Path]) -> str:
    """Hex SHA-256 over the names and contents of `paths`, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()
