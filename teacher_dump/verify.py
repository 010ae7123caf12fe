"""Verify a cache: every byte of it, and with `deep` a sample of rows against the teacher."""

import click
import numpy as np

from shared.cache import CacheReader, check_whole, missing_shards, parquet_names, summary
from shared.errors import DamagedError, UsageError, differences
from shared.records import Row, Sample
from shared.shardfile import check_shard
from shared.sidecar import local_sidecar
from shared.store import Store
from teacher_dump.hub import model_folder
from teacher_dump.recording import divergence, row_uniforms, sample_records
from teacher_dump.teacher import Teacher, load_teacher, teacher_identity

# Mean KL in nats. Rounding to 1/32 nat costs 2e-5; bfloat16 layers differ between batch shapes.
KL_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
DRAWS_TOLERANCE = {"float32": 0.99, "bfloat16": 0.9}  # share of draws that come out the same
HEAD_POSITIONS = 512
ROWS_AT_ONCE = 4


def verify_cache(store: Store) -> None:
    """Read every shard and the sidecar; print a line for each, and the sums.

    Raises UsageError if there is no cache, DamagedError if anything is damaged, missing, foreign,
    or should not be there.
    """
    names = parquet_names(store)
    if not names:
        raise UsageError(f"no cache at {store}: make one with teacher-dump --out {store}")
    width = max(map(len, names))
    footers, faults = [], 0
    click.echo(f"{'shard':{width}}  {'rows':>9} {'tokens':>12} {'bytes':>14}  state")
    for name in names:
        try:
            footer = check_shard(store, name)
        except DamagedError as error:
            faults += 1
            click.echo(f"{name:{width}}  {'-':>9} {'-':>12} {'-':>14}  {error.message}")
            continue
        rows, tokens = len(footer.lengths), footer.lengths.sum()
        click.echo(f"{name:{width}}  {rows:9} {tokens:12} {footer.size:14}  ok")
        footers.append(footer)
    for name in missing_shards(footers[0].fingerprint, names) if footers else []:
        faults += 1
        click.echo(f"{name:{width}}  {'-':>9} {'-':>12} {'-':>14}  missing")
    if faults:
        raise DamagedError(
            f"{store}: {faults} of its shards are not as they should be, see above; the same "
            "teacher-dump command makes damaged and missing ones again"
        )
    check_whole(store, footers)
    local_sidecar(store, footers[0].fingerprint)
    click.echo(f"{'teacher/':{width}}  {'':>9} {'':>12} {'':>14}  ok")
    for line in summary(store, footers):
        click.echo(line)


def verify_deep(store: Store, name: str | None, rows: int) -> str:
    """Compute `rows` rows of each split with the teacher again and compare; a line of findings.

    `name`: the teacher's folder or hub name; default that of the fingerprint. Raises UsageError if
    it is not the teacher of this cache, DamagedError if the records differ beyond tolerance.
    """
    readers = {split: CacheReader(store, split) for split in ("train", "validation")}
    fingerprint = readers["train"].fingerprint
    if fingerprint["kind"] == "tokens":
        raise UsageError(f"{store} holds tokens alone: there are no records to compute again")
    teacher = _teacher_of(fingerprint, name)
    chosen = [
        (split, reader.row(int(number)))
        for split, reader in readers.items()
        for number in np.unique(np.linspace(0, len(reader) - 1, rows).astype(int))
    ]
    chosen = [(split, row) for split, row in chosen if len(row.tokens) > 1]
    parts = [chosen[i : i + ROWS_AT_ONCE] for i in range(0, len(chosen), ROWS_AT_ONCE)]
    if fingerprint["kind"] == "sample":
        seed = fingerprint["sample_seed"]
        same = np.concatenate([_same_draws(teacher, part, seed) for part in parts])
        fault = same.mean() < DRAWS_TOLERANCE[fingerprint["dtype"]]
        found = f"{same.mean():.2%} of the draws are the same"
    else:
        pairs = [([row.tokens for _, row in p], [row.record for _, row in p]) for p in parts]
        kl = np.concatenate([divergence(teacher, *pair, HEAD_POSITIONS) for pair in pairs])
        fault = not kl.mean() <= KL_TOLERANCE[fingerprint["dtype"]]
        found = f"KL mean {kl.mean():.1e}, p99 {np.quantile(kl, 0.99):.1e} nats"
    line = f"{len(chosen)} rows computed again: {found}"
    if fault:
        raise DamagedError(f"{store}: {line}; these records are not this teacher's")
    return line


def _teacher_of(fingerprint: dict, name: str | None) -> Teacher:
    expected = fingerprint["teacher"]
    name = name or expected["name"]
    try:
        folder = model_folder(name, expected["revision"], weights=True)
    except UsageError as error:
        raise UsageError(f"{error.message}\nwhere the teacher is now: give --teacher") from None
    found = teacher_identity(folder, name, expected["revision"])
    keys = ("config_sha256", "weights_sha256")
    if any(found[key] != expected[key] for key in keys):
        raise UsageError(
            f"{name} is not the teacher of this cache:\n"
            + differences({k: found[k] for k in keys}, {k: expected[k] for k in keys})
        )
    return load_teacher(folder, fingerprint["dtype"], fingerprint["token_ids"])


def _same_draws(teacher: Teacher, part: list[tuple[str, Row]], seed: int) -> np.ndarray:
    """Share of equal draws, float64 [positions]."""
    draws = int(part[0][1].record.counts[0].sum())
    uniforms = [
        row_uniforms(seed, split, row.number, len(row.tokens) - 1, draws) for split, row in part
    ]
    now = sample_records(teacher, [row.tokens for _, row in part], uniforms, HEAD_POSITIONS)
    return (
        np.concatenate(
            [_overlap(row.record, again) for (_, row), again in zip(part, now, strict=True)]
        )
        / draws
    )


def _overlap(a: Sample, b: Sample) -> np.ndarray:
    """Draws in common at each position, int64 [positions]."""
    pairs = a.ids[:, :, None] == b.ids[:, None, :]
    return np.where(pairs, np.minimum(a.counts[:, :, None], b.counts[:, None, :]), 0).sum((1, 2))
