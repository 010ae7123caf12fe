"""One worker's dump: plan the shards, refuse a foreign folder, make what is missing.

Workers do not communicate. Which rows a shard holds follows from the fingerprint and the shard
count; worker i of n makes every n-th shard; whoever sees all of them writes the manifest.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from shared.cache import (
    MANIFEST,
    plan_shards,
    read_footers,
    shard_names,
    summary,
    write_manifest,
)
from shared.codec import MAX_VOCAB, QUANTISER
from shared.errors import DamagedError, UnreadableError, UsageError, differences
from shared.files import remove_stale
from shared.progress import progress, say
from shared.records import Row, Sample, TopK
from shared.shardfile import (
    FORMAT_VERSION,
    GROUP_ROWS,
    Shard,
    check_shard,
    identity,
    read_footer,
    write_shard,
)
from shared.sidecar import SIDECAR, check_owner, has_sidecar
from shared.store import Store, open_store
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
from teacher_dump.parallel import Team, finish, load
from teacher_dump.parallel import team as make_team
from teacher_dump.recording import row_uniforms, sample_records, topk_records

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


def dump(config: DumpConfig, out: str | Path) -> None:
    """Make this worker's shards of the cache `out`, a folder or URL; finished ones are kept.

    Raises UsageError for bad input, DamagedError if `out` holds something else; both before
    anything is written.
    """
    started = time.monotonic()
    team = make_team(config)
    store = open_store(out)
    job = prepare(config)
    shards = job.shards()
    check_folder(store, shards, job.fingerprint)
    if store.local is not None:
        remove_stale(store.local)
    mine = shards[team.index :: team.count]
    team = team.join()
    missing = team.agreed([shard for shard in mine if not _is_done(store, shard.name)])
    if team.any(bool(missing) or not has_sidecar(store)):
        _make(job, store, team, mine, missing)
    total = sum(shard.end_row - shard.first_row for shard in missing)
    say(
        f"worker {team.index} of {team.count}: made {len(missing)} of its {len(mine)} shards, "
        f"{total} rows, {time.monotonic() - started:.0f} s"
    )
    if not team.leads:
        return
    try:
        footers = read_footers(store)
    except DamagedError as error:
        if team.count == 1:
            raise
        say(f"not finished: {error.message}\n(other workers may be at it)")
        return
    write_manifest(store, footers)
    for line in summary(store, footers):
        click.echo(line)


def prepare(config: DumpConfig) -> Job:
    """Find tokenizer, teacher and documents, and choose the rows. Raises UsageError."""
    names = [name for name in (config.teacher, config.tokenizer) if name is not None]
    if any(map(is_hub_name, names)) or any(map(is_hub_dataset, config.data.splitlines())):
        offline_unless_reachable()
    scored = config.kind != "tokens"
    teacher_folder = model_folder(config.teacher, config.revision, weights=True) if scored else None
    tokenizer_folder = (
        model_folder(config.tokenizer, None, weights=False)
        if config.tokenizer is not None
        else teacher_folder or model_folder(config.teacher, config.revision, weights=False)
    )
    tokenizer = teachers.load_tokenizer(tokenizer_folder)
    token_ids = vocab_size = teachers.token_id_count(tokenizer)
    identity_of_teacher = dict.fromkeys(("name", "revision", "config_sha256", "weights_sha256"))
    if scored:
        identity_of_teacher = teachers.teacher_identity(
            teacher_folder, config.teacher, config.revision
        )
        vocab_size = teachers.vocab_size(teacher_folder)
        if token_ids > vocab_size:
            raise UsageError(
                f"the tokenizer in {tokenizer_folder} has {token_ids} ids, the teacher's "
                f"vocabulary only {vocab_size}: give the teacher's own tokenizer"
            )
    if config.kind == "topk" and config.k >= token_ids:
        raise UsageError(f"k: found {config.k}, expected less than the token ids, {token_ids}")
    if vocab_size > MAX_VOCAB:
        raise UsageError(f"found a vocabulary of {vocab_size}, expected at most {MAX_VOCAB}")
    say(f"reading the corpus {config.data.replace(chr(10), ' ')}")
    documents = load_documents(config.data, config.data_config, config.text_field)
    plan = plan_rows(
        documents, config.validation_fraction, config.max_rows, config.max_validation_rows
    )
    fingerprint = {
        "format": FORMAT_VERSION,
        **_record_settings(config),
        "vocab_size": vocab_size,
        "token_ids": token_ids,
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
        "dtype": config.dtype if scored else None,
        "versions": _versions(),
    }
    return Job(config, documents, plan, tokenizer, tokenizer_folder, teacher_folder, fingerprint)


def _record_settings(config: DumpConfig) -> dict[str, Any]:
    """The settings that decide this kind's records."""
    names = {"topk": ("k", "min_prob", "top_p"), "sample": ("samples", "sample_seed"), "tokens": ()}
    settings = {name: getattr(config, name) for name in names[config.kind]}
    quantiser = {"quantiser": QUANTISER} if config.kind == "topk" else {}
    return {"kind": config.kind, **settings, **quantiser}


def _short(source: str) -> str:
    """A source's name without the folders above it: they differ between machines."""
    return Path(source).absolute().name if Path(source).exists() or "*" in source else source


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def check_folder(store: Store, shards: list[Shard], fingerprint: dict[str, Any]) -> None:
    """Raise if the folder holds anything but (a part of) the cache with this fingerprint."""
    if store.local is not None and store.local.exists() and not store.local.is_dir():
        raise UsageError(f"{store} is a file: give another --out")
    names = shard_names(store)
    ours = {SIDECAR, MANIFEST}
    strange = [n for n in store.names() if n not in ours and not n.startswith(".tmp-")]
    if strange and not names:
        raise UsageError(
            f"{store} is not empty and no cache (it holds {strange[0]}): give another --out"
        )
    planned = {shard.name for shard in shards}
    for name in names:
        try:
            footer = read_footer(store, name)
        except UnreadableError:
            continue  # whose it was cannot be told; if it is one of ours it is made again
        if identity(footer.fingerprint) != identity(fingerprint):
            raise DamagedError(
                f"{store.path(name)} is of another cache, nothing was written; give another --out\n"
                + differences(identity(footer.fingerprint), identity(fingerprint))
            )
        if name not in planned:
            split, found = footer.shard.split, footer.shard.count
            count = next(shard.count for shard in shards if shard.split == split)
            raise DamagedError(
                f"{store.path(name)}: found {found} {split} shards, this command makes {count}, "
                "nothing was written; give the same number or another --out"
            )
    if has_sidecar(store):
        check_owner(store, fingerprint)


def _is_done(store: Store, name: str) -> bool:
    """Whether the shard exists and verifies; says so if it has to be made again."""
    if not store.has(name):
        return False
    try:
        check_shard(store, name)
    except UnreadableError as error:
        click.echo(f"{error.message}; making it again", err=True)
        return False
    return True


def _make(job: Job, store: Store, team: Team, mine: list[Shard], missing: list[Shard]) -> None:
    """Load the teacher, write the sidecar if it is not there, and the missing shards."""
    teacher = None
    if job.teacher_folder is not None:
        token_ids = job.fingerprint["token_ids"]
        teacher = load(team, job.teacher_folder, job.config.dtype, token_ids)
    if team.leads and not has_sidecar(store):
        teachers.write_teacher_sidecar(
            store, job.fingerprint, job.tokenizer_folder, job.teacher_folder, teacher
        )
    rows = {False: 0, True: 0}
    for shard in mine:
        rows[shard in missing] += shard.end_row - shard.first_row
    with progress("rows", sum(rows.values()), done=rows[False]) as advance:
        for shard in missing:
            groups = _groups(job, teacher, shard, advance)
            if team.writes:
                write_shard(store, shard, job.fingerprint, groups)
            else:
                deque(groups, maxlen=0)  # compute its part, keep nothing
    finish(teacher)
    team.any(False)  # all shards of these ranks are written


def _groups(
    job: Job, teacher: teachers.Teacher | None, shard: Shard, advance: Callable[[int, str], None]
) -> Iterator[list[Row]]:
    """The rows of `shard` in groups of GROUP_ROWS."""
    started, tokens = time.monotonic(), 0
    for first, window in _windows(job, shard):
        numbers = range(first, first + len(window))
        records = make_records(job.config, teacher, shard.split, numbers, window)
        rows = [Row(*parts) for parts in zip(numbers, window, records, strict=True)]
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


def make_records(
    config: DumpConfig,
    teacher: teachers.Teacher | None,
    split: str,
    numbers: Sequence[int],
    window: list[np.ndarray],
) -> list[TopK | Sample | None]:
    """Records of rows (their numbers and tokens), in their order, in batches of similar length.

    The longest batch comes first: if one is too large, that shows at once.
    """
    records: list[TopK | Sample | None] = [None] * len(window)
    if teacher is None:
        return records
    order = sorted(range(len(window)), key=lambda i: -len(window[i]))
    while order:
        size = max(1, config.batch_tokens // max(1, len(window[order[0]])))
        batch, order = order[:size], order[size:]
        rows = [window[i] for i in batch]
        if config.kind == "topk":
            made = topk_records(teacher, rows, config.k, config.head_positions)
            made = [record.truncate(config.min_prob, config.top_p) for record in made]
        else:
            positions = {i: max(0, len(window[i]) - 1) for i in batch}
            uniforms = [
                row_uniforms(config.sample_seed, split, numbers[i], positions[i], config.samples)
                for i in batch
            ]
            made = sample_records(teacher, rows, uniforms, config.head_positions)
        for i, record in zip(batch, made, strict=True):
            records[i] = record
    return records
