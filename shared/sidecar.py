"""The sidecar: what a student takes from the teacher, beside the shards, in `CACHE/teacher`.

The tokenizer's files; with a teacher also its config.json and teacher.safetensors
(`embed_tokens.weight` and `lm_head.weight` [vocab, width], `norm.weight` [width]). `files.json`
names whose they are and the SHA-256 of each; it is written last, so without it there is no sidecar.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shared.errors import DamagedError, differences
from shared.files import sha256_files
from shared.shardfile import damage
from shared.store import Store

SIDECAR = "teacher"
INDEX = "files.json"
WEIGHTS = "teacher.safetensors"


def has_sidecar(cache: Store) -> bool:
    """Whether the sidecar was written to its end."""
    return cache.child(SIDECAR).has(INDEX)


def write_sidecar(cache: Store, fingerprint: dict[str, Any], files: list[Path]) -> None:
    """Copy `files` into the sidecar. Another worker may do the same at the same time."""
    store = cache.child(SIDECAR)
    for path in files:
        with store.writing(path.name) as copy:
            shutil.copyfile(path, copy)
    index = {**_owner(fingerprint), "files": {path.name: sha256_files([path]) for path in files}}
    store.write_text(INDEX, json.dumps(index, indent=1) + "\n")


def check_owner(cache: Store, fingerprint: dict[str, Any]) -> dict[str, str]:
    """The sidecar's files and their digests. Raises DamagedError if it is missing or foreign."""
    store = cache.child(SIDECAR)
    if not has_sidecar(cache):
        raise DamagedError(
            f"{store.path(INDEX)} is missing: run the same teacher-dump again, it makes what is "
            "missing"
        )
    with damage(store.path(INDEX)):
        index = json.loads(store.read(INDEX))
        files = {str(name): str(digest) for name, digest in index.pop("files").items()}
        if any(Path(name).name != name for name in files):
            raise ValueError("a file of another folder")
    if index != _owner(fingerprint):
        raise DamagedError(
            f"{store} is not of this cache:\n" + differences(index, _owner(fingerprint))
        )
    return files


def local_sidecar(cache: Store, fingerprint: dict[str, Any]) -> Path:
    """The sidecar as a local folder, every file checked; a remote one is fetched once per user.

    Raises DamagedError.
    """
    files = check_owner(cache, fingerprint)
    store = cache.child(SIDECAR)
    if store.local is not None:
        _check_files(store.local, files)
        return store.local
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stackgrow"
    home.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    folder = home / digest
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=home, prefix=".tmp-") as temporary:
            fetched = Path(temporary) / digest
            for name in (*files, INDEX):
                store.fetch(name, fetched / name)
            _check_files(fetched, files)
            try:
                os.rename(fetched, folder)
            except OSError:
                if not folder.is_dir():  # else another rank was first
                    raise
    _check_files(folder, files)
    return folder


def _check_files(folder: Path, files: dict[str, str]) -> None:
    for name, digest in files.items():
        path = folder / name
        if not path.is_file() or sha256_files([path]) != digest:
            state = "damaged" if path.is_file() else "missing"
            raise DamagedError(
                f"{path} is {state}: delete {folder / INDEX} and run the same teacher-dump again"
            )


def _owner(fingerprint: dict[str, Any]) -> dict[str, Any]:
    return {key: fingerprint[key] for key in ("teacher", "tokenizer_sha256")}
