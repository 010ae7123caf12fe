"""Folders that hold a cache: local ones, and remote ones by URL, as in `s3://bucket/cache`.

URLs are those of `pyarrow.fs.FileSystem.from_uri`, else of fsspec. A file appears whole or not at
all everywhere: it is written to a local temporary file, then renamed (local), put (object stores,
where an upload is visible only when complete), or copied to a temporary name and moved.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs as pafs

from shared.errors import UsageError
from shared.files import replacing

OBJECT_STORES = ("s3", "gcs", "abfs")


@dataclass(frozen=True)
class Store:
    """A folder on some file system; `str()` is the location as it was given."""

    location: str
    fs: pafs.FileSystem
    root: str  # the folder's path within `fs`

    def __str__(self) -> str:
        return self.location

    @property
    def local(self) -> Path | None:
        """The folder as a local path; None if it is remote."""
        return Path(self.root) if isinstance(self.fs, pafs.LocalFileSystem) else None

    def path(self, name: str) -> str:
        """The path of a file of this folder, for messages."""
        return f"{self.location.split('?')[0].rstrip('/')}/{name}"

    def child(self, name: str) -> "Store":
        """A folder in this folder."""
        return Store(self.path(name), self.fs, f"{self.root}/{name}")

    def names(self) -> list[str]:
        """Names of what is in the folder, sorted; none if there is no such folder."""
        selector = pafs.FileSelector(self.root, allow_not_found=True)
        return sorted(info.base_name for info in self.fs.get_file_info(selector))

    def is_folder(self) -> bool:
        """Whether there is such a folder."""
        return self.fs.get_file_info(self.root).type == pafs.FileType.Directory

    def has(self, name: str) -> bool:
        """Whether the folder holds this file."""
        return self.fs.get_file_info(f"{self.root}/{name}").type == pafs.FileType.File

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for random access. Raises OSError."""
        return self.fs.open_input_file(f"{self.root}/{name}")

    def read(self, name: str) -> bytes:
        """The whole of a small file. Raises OSError."""
        with self.open(name) as file:
            return file.read()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a local path to write; on success it takes the place of `name`, atomically."""
        if self.local is not None:
            with replacing(self.local / name) as temporary:
                yield temporary
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / name
            self.put(Path(folder) / name, name)

    def put(self, source: Path, name: str) -> None:
        """Copy a local file into this remote folder, where it appears whole or not at all."""
        final = f"{self.root}/{name}"
        direct = self.fs.type_name in OBJECT_STORES
        target = final if direct else f"{self.root}/.tmp-{name}"
        if not direct:
            self.fs.create_dir(self.root, recursive=True)
        pafs.copy_files(str(source), target, pafs.LocalFileSystem(), self.fs, use_threads=False)
        if not direct:
            self.fs.move(target, final)

    def write_text(self, name: str, text: str) -> None:
        """Write a small UTF-8 file atomically."""
        with self.writing(name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file of this folder to the local path `target`."""
        with self.open(name) as source, replacing(target) as copy, copy.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 24)


def open_store(location: "str | Path | Store") -> Store:
    """The folder at a local path or URL; it need not exist. Raises UsageError."""
    if isinstance(location, Store):
        return location
    text = str(location)
    if "://" not in text:
        return Store(text, pafs.LocalFileSystem(), str(Path(text).absolute()))
    try:
        filesystem, root = pafs.FileSystem.from_uri(text)
    except (ValueError, pa.ArrowException) as error:  # not one of Arrow's own
        try:
            import fsspec

            inner, root = fsspec.core.url_to_fs(text)
        except (ImportError, ValueError):
            raise UsageError(f"{text}: no file system for this URL ({error})") from None
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(inner))
    return Store(text, filesystem, root.rstrip("/"))
