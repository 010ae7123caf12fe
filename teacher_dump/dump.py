"""One worker's dump: plan the shards, refuse a foreign folder, make what is missing.

Workers do not communicate. Which rows a shard holds follows from the fingerprint and the shard
count; worker i of n makes every n-th shard; whoever sees all of them writes the manifest.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shared.cache import (
    FORMAT_VERSION,
    GROUP_ROWS,
    Shard,
    check_shard,
    identity,
    plan_shards,
    read_footer,
    read_lengths,
    shard_paths,
    write_manifest,
    write_shard,
)
from shared.distributed import worker
from shared.errors import DamagedError, UsageError, differences
from shared.progress import progress, say
from shared.records import Row, TopK
from teacher_dump import teacher as teachers
from teacher_dump.config import DumpConfig
from teacher_dump.corpus import (
    Documents,
    RowPlan,
    is_hub_dataset,
    load_documents,
    plan_rows,
    token_rows,
)
from teacher_dump.hub import is_hub_name, model_folder, offline_unless_reachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW_GROUPS = 16  # row groups sorted by length together
WINDOW_TOKENS = 1 << 20  # ... but no more than this, so memory stays flat over long documents


@dataclass(frozen=True)
class Job:
    """What a dump works from, read and checked before anything is written."""

    config: DumpConfig
    documents: Documents
    plan: RowPlan
    tokenizer: "PreTrainedTokenizerBase"
    tokenizer_folder: Path
    teacher_folder: Path | None  # None for kind `tokens`
    fingerprint: dict[str, Any]

    def shards(self) -> list[Shard]:
        """All shards of the cache, the few of validation first."""
        return plan_shards(
            "validation", len(self.plan.validation), self.config.validation_shards
        ) + plan_shards("train", len(self.plan.train), self.config.shards)


def dump(config: DumpConfig, out: Path) -> None:
    """Make this worker's shards of the cache `out`; those that exist and verify are kept.

    Raises UsageError for bad input, DamagedError if `out` holds something else; both before
    anything is written.
    """
    started = time.monotonic()
    job = prepare(config)
    shards = job.shards()
    check_folder(out, shards, job.fingerprint)
    index, count = worker()
    mine = shards[index::count]
    missing = [shard for shard in mine if not _is_done(out / shard.name)]
    if missing or not (out / teachers.SIDECAR).is_dir():
        _make(job, out, mine, missing)
    total = sum(shard.end_row - shard.first_row for shard in missing)
    say(
        f"worker {index} of {count}: made {len(missing)} of its {len(mine)} shards, "
        f"{total} rows, {time.monotonic() - started:.0f} s"
    )
    if all((out / shard.name).is_file() for shard in shards):
        for line in summary(out, write_manifest(out)):
            click.echo(line)


def prepare(config: DumpConfig) -> Job:
    """Find tokenizer, teacher and documents, and choose the rows. Raises UsageError."""
    names = [name for name in (config.teacher, config.tokenizer) if name is not None]
    if any(map(is_hub_name, names)) or any(map(is_hub_dataset, config.data.splitlines())):
        offline_unless_reachable()
    topk = config.kind == "topk"
    teacher_folder = model_folder(config.teacher, config.revision, weights=True) if topk else None
    tokenizer_folder = (
        model_folder(config.tokenizer, None, weights=False)
        if config.tokenizer is not None
        else teacher_folder or model_folder(config.teacher, config.revision, weights=False)
    )
    tokenizer = teachers.load_tokenizer(tokenizer_folder)
    vocab_size = teachers.token_id_count(tokenizer)
    identity_of_teacher = dict.fromkeys(("name", "revision", "config_sha256", "weights_sha256"))
    if topk:
        identity_of_teacher = teachers.teacher_identity(
            teacher_folder, config.teacher, config.revision
        )
        ids, vocab_size = vocab_size, teachers.vocab_size(teacher_folder)
        if ids > vocab_size:
            raise UsageError(
                f"the tokenizer in {tokenizer_folder} has {ids} ids, the teacher's vocabulary only "
                f"{vocab_size}: give the teacher's own tokenizer"
            )
        if config.k >= vocab_size:
            raise UsageError(
                f"k: found {config.k}, expected less than the vocabulary, {vocab_size}"
            )
    say(f"reading the corpus {config.data.replace(chr(10), ' ')}")
    documents = load_documents(config.data, config.data_config, config.text_field)
    plan = plan_rows(
        documents, config.validation_fraction, config.max_rows, config.max_validation_rows
    )
    fingerprint = {
        "format": FORMAT_VERSION,
        "kind": config.kind,
        "k": config.k if topk else 0,
        "vocab_size": vocab_size,
        "teacher": identity_of_teacher,
        "tokenizer_sha256": teachers.tokenizer_sha256(tokenizer_folder),
        "corpus": {
            "name": " ".join(_short(source) for source in config.data.splitlines()),
            "documents": len(documents),
            "sha256": plan.sha256,
            "validation_fraction": config.validation_fraction,
        },
        "rows": {"train": len(plan.train), "validation": len(plan.validation)},
        "max_length": config.max_length,
        "dtype": config.dtype if topk else None,
        "versions": _versions(),
    }
    return Job(config, documents, plan, tokenizer, tokenizer_folder, teacher_folder, fingerprint)


def _short(source: str) -> str:
    """A source's name without the folders above it: they differ between machines."""
    return Path(source).absolute().name if Path(source).exists() or "*" in source else source


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def check_folder(out: Path, shards: list[Shard], fingerprint: dict[str, Any]) -> None:
    """Raise if `out` holds anything but (a part of) the cache with this fingerprint and layout."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give another --out")
    if not out.is_dir():
        return
    paths = shard_paths(out)
    ours = {teachers.SIDECAR, "manifest.json"}
    strange = [p for p in out.iterdir() if p.name not in ours and not p.name.startswith(".tmp-")]
    if strange and not paths:
        raise UsageError(
            f"{out} is not empty and no cache (it holds {strange[0].name}): give another --out"
        )
    planned = {shard.name: shard for shard in shards}
    for path in paths:
        footer = _footer(path)
        if footer is not None and identity(footer["fingerprint"]) != identity(fingerprint):
            raise DamagedError(
                f"{path} is of another cache, nothing was written; give another --out\n"
                + differences(identity(footer["fingerprint"]), identity(fingerprint))
            )
        if path.name not in planned:
            split, of = path.name.split("-")[0], path.stem.split("-")[-1]
            count = next(shard.count for shard in shards if shard.split == split)
            raise DamagedError(
                f"{path}: found {int(of)} {split} shards, this command makes {count}, nothing was "
                "written; give the same number or another --out"
            )
    fault = teachers.sidecar_fault(out, fingerprint) if (out / teachers.SIDECAR).exists() else None
    if fault:
        raise DamagedError(f"{fault}\nnothing was written; give another --out or delete it")


def _footer(path: Path) -> dict[str, Any] | None:
    """A shard's footer; None if the file is too damaged to tell. Raises for a foreign file."""
    try:
        return read_footer(path)
    except DamagedError:
        try:
            pq.read_metadata(path)
        except (OSError, ValueError, pa.ArrowException):
            return None
        raise


def _is_done(path: Path) -> bool:
    """Whether the shard exists and verifies; says so if it has to be made again."""
    if not path.is_file():
        return False
    try:
        check_shard(path)
    except DamagedError as error:
        click.echo(f"making {path.name} again: {error.message}", err=True)
        return False
    return True


def _make(job: Job, out: Path, mine: list[Shard], missing: list[Shard]) -> None:
    """Load the teacher, write the sidecar if it is not there, and the missing shards."""
    teacher = None
    if job.teacher_folder is not None:
        teacher = teachers.load_teacher(job.teacher_folder, job.config.dtype)
    if not (out / teachers.SIDECAR).is_dir():
        teachers.write_sidecar(
            out, job.fingerprint, job.tokenizer_folder, job.teacher_folder, teacher
        )
    rows = {False: 0, True: 0}
    for shard in mine:
        rows[shard in missing] += shard.end_row - shard.first_row
    with progress("rows", sum(rows.values()), done=rows[False]) as advance:
        for shard in missing:
            write_shard(out, shard, job.fingerprint, _groups(job, teacher, shard, advance))


def _groups(
    job: Job, teacher: teachers.Teacher | None, shard: Shard, advance: Callable[[int, str], None]
) -> Iterator[list[Row]]:
    """The rows of `shard` in groups of GROUP_ROWS."""
    started, tokens = time.monotonic(), 0
    for first, window in _windows(job, shard):
        records = _records(job.config, teacher, window)
        rows = [Row(first + i, *pair) for i, pair in enumerate(zip(window, records, strict=True))]
        for start in range(0, len(rows), GROUP_ROWS):
            yield rows[start : start + GROUP_ROWS]
        tokens += sum(map(len, window))
        speed = tokens / (time.monotonic() - started)
        advance(len(rows), f"{shard.name} {speed:.0f} tokens/s")


def _windows(job: Job, shard: Shard) -> Iterator[tuple[int, list[np.ndarray]]]:
    """(first row, token rows) of pieces of whole row groups, bounded in rows and tokens."""
    numbers = getattr(job.plan, shard.split)
    window: list[np.ndarray] = []
    for first in range(shard.first_row, shard.end_row, GROUP_ROWS):
        end = min(first + GROUP_ROWS, shard.end_row)
        texts = [job.documents[int(n)] for n in numbers[first:end]]
        window += token_rows(job.tokenizer, texts, job.config.max_length)
        full = len(window) >= WINDOW_GROUPS * GROUP_ROWS or sum(map(len, window)) >= WINDOW_TOKENS
        if full or end == shard.end_row:
            yield end - len(window), window
            window = []


def _records(
    config: DumpConfig, teacher: teachers.Teacher | None, window: list[np.ndarray]
) -> list[TopK | None]:
    """Records of the window's rows, in its order; batches of similar length, longest first."""
    records: list[TopK | None] = [None] * len(window)
    if teacher is None:
        return records
    order = sorted(range(len(window)), key=lambda i: -len(window[i]))
    while order:
        size = max(1, config.batch_tokens // len(window[order[0]]))
        batch, order = order[:size], order[size:]
        rows = [window[i] for i in batch]
        made = teachers.records(teacher, rows, config.k, config.head_positions)
        for i, record in zip(batch, made, strict=True):
            records[i] = record
    return records


def verify_cache(folder: Path, deep: bool) -> None:
    """Check all of a cache, rewrite its manifest, print a line per split. Raises DamagedError.

    `deep` reads every page and checks its checksum; otherwise only the footers are read.
    """
    if not folder.is_dir():
        raise UsageError(f"no cache at {folder}: make one with teacher-dump --out {folder}")
    faults = []
    for path in shard_paths(folder):
        try:
            check_shard(path) if deep else read_footer(path)
        except DamagedError as error:
            faults.append(error.message)
    if faults:
        raise DamagedError("\n".join(faults))
    manifest = write_manifest(folder)
    for split, rows in manifest["fingerprint"]["rows"].items():
        found = _rows(manifest, split)
        if found != rows:
            raise DamagedError(
                f"{folder}: found {found} {split} rows, expected {rows}: run the same "
                "teacher-dump again, it makes only what is missing"
            )
    fault = teachers.sidecar_fault(folder, manifest["fingerprint"])
    if fault:
        raise DamagedError(fault)
    for line in summary(folder, manifest):
        click.echo(line)


def _rows(manifest: dict[str, Any], split: str) -> int:
    entries = [entry for entry in manifest["shards"] if entry["split"] == split]
    return sum(entry["end_row"] - entry["first_row"] for entry in entries)


def summary(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """One line per split: rows, tokens, bytes, bytes per token."""
    lines = []
    for split in ("train", "validation"):
        entries = [entry for entry in manifest["shards"] if entry["split"] == split]
        tokens = sum(int(read_lengths(folder / entry["name"]).sum()) for entry in entries)
        size = sum(entry["bytes"] for entry in entries)
        lines.append(
            f"{folder} {split}: {len(entries)} shards, {_rows(manifest, split)} rows, "
            f"{tokens} tokens, {size} bytes, {size / max(1, tokens):.1f} bytes/token"
        )
    return lines
