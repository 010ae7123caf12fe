"""What a cache holds, for people: identity, sizes, statistics of its records, one row as text."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.cache import CacheReader, read_footers, summary
from shared.errors import UsageError
from shared.records import Row, TopK
from shared.shardfile import Footer, read_footer
from shared.sidecar import local_sidecar
from shared.store import Store
from teacher_dump.teacher import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASS_AT = (1, 8, 16, 32, 64)
SHOWN_POSITIONS = 24
SHOWN_IDS = 5


def inspect_cache(store: Store, split: str, rows: int, row: int) -> list[str]:
    """Lines that describe the cache; statistics over `rows` rows spread over `split`.

    Raises UsageError if there is no cache or no such row, DamagedError if it is damaged.
    """
    footers = read_footers(store)
    reader = CacheReader(store, split)
    if not 0 <= row < len(reader):
        raise UsageError(f"row: found {row}, expected 0 to {len(reader) - 1} in {split}")
    lines = [*_identity(reader.fingerprint), *summary(store, footers)]
    lines += _bytes_per_token(store, [f for f in footers if f.shard.split == split])
    tokenizer = load_tokenizer(local_sidecar(store, reader.fingerprint))
    if reader.fingerprint["kind"] != "tokens":
        chosen = np.unique(np.linspace(0, len(reader) - 1, rows).astype(int))
        lines += ["", *_statistics([reader.row(int(number)) for number in chosen], split)]
    return [*lines, "", *_as_text(reader.row(row), split, tokenizer)]


def _identity(fingerprint: dict[str, Any]) -> list[str]:
    values = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in fingerprint.items()}
    return [f"{key:17} {value}" for key, value in values.items()]


def _bytes_per_token(store: Store, footers: list[Footer]) -> list[str]:
    """Compressed size of each column over all shards of a split, largest first."""
    sizes: Counter[str] = Counter()
    for footer in footers:
        parquet = read_footer(store, footer.shard.name).parquet
        for group in map(parquet.row_group, range(parquet.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                sizes[column.path_in_schema.split(".")[0]] += column.total_compressed_size
    sizes["footers"] = sum(footer.size for footer in footers) - sum(sizes.values())
    tokens = sum(int(footer.lengths.sum()) for footer in footers)
    parts = ", ".join(f"{name} {size / tokens:.2f}" for name, size in sizes.most_common())
    return [f"bytes per token: {parts}"]


def _probabilities(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids and probabilities [T-1, m], the likeliest first and 0 in the padding; tail mass [T-1].

    Of draws: their shares.
    """
    record = row.record
    if isinstance(record, TopK):
        tail = np.exp(record.tail_logprob.astype(np.float64))
        return record.ids, np.exp(record.logprobs.astype(np.float64)), tail
    shares = record.counts / record.counts.sum(1, keepdims=True)
    order = np.argsort(-shares, axis=1, kind="stable")
    ids, shares = (np.take_along_axis(a, order, axis=1) for a in (record.ids, shares))
    return ids, shares, np.zeros(len(ids))


def _statistics(rows: list[Row], split: str) -> list[str]:
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("kept", "entropy", "tail", "first", "inside", "nats", *MASS_AT)
    }
    for row in (row for row in rows if len(row.tokens) > 1):
        ids, p, tail = _probabilities(row)
        buckets = np.concatenate([p, tail[:, None]], axis=1)
        next_token = row.tokens[1:, None]
        of_next = np.where(ids == next_token, p, 0).max(1)
        columns["kept"].append((p > 0).sum(1))
        columns["entropy"].append(-(buckets * np.log(np.maximum(buckets, 1e-300))).sum(1))
        columns["tail"].append(tail)
        columns["first"].append(ids[:, 0] == next_token[:, 0])
        columns["inside"].append(of_next > 0)
        columns["nats"].append(-np.log(of_next[of_next > 0]))
        for k in MASS_AT:
            columns[k].append(p[:, :k].sum(1))
    if not columns["kept"]:
        return [f"no positions in these {len(rows)} rows of {split}"]
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    mean = {name: values.mean() if len(values) else np.nan for name, values in joined.items()}
    kept = joined["kept"]
    is_topk = isinstance(rows[0].record, TopK)
    masses = ", ".join(f"{mean[k]:.4f} at k = {k}" for k in MASS_AT if k == 1 or k <= kept.max())
    return [
        f"{len(rows)} rows of {split}, {len(kept)} positions; means over positions:",
        f"ids         {mean['kept']:.1f} ({kept.min()} to {kept.max()})",
        f"entropy     {mean['entropy']:.3f} nats"
        + (", all of the tail as one id" if is_topk else " of the draws, below the teacher's"),
        f"mass        {masses}" + (f", tail {mean['tail']:.4f}" if is_topk else " of the draws"),
        f"text        its next token is the first id at {mean['first']:.1%} of positions, one of "
        f"the ids at {mean['inside']:.1%}, there at {mean['nats']:.3f} nats",
    ]


def _as_text(row: Row, split: str, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The row's text, then for its first positions: the token, what came next, what was likely."""
    tokens = row.tokens.tolist()
    lines = [f"row {row.number} of {split}, {len(tokens)} tokens:"]

    def show(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    if row.record is None or len(tokens) < 2:
        return [*lines, tokenizer.decode(tokens)]
    ids, p, _ = _probabilities(row)
    lines += [f"{'position':>8}  {'token':16} {'next, its probability':24} likeliest ids"]
    for i in range(min(SHOWN_POSITIONS, len(ids))):
        found = p[i][ids[i] == tokens[i + 1]].max(initial=0)
        chance = f"{found:.3f}" if found else "not kept"
        likely = "  ".join(
            f"{show(a)} {b:.3f}"
            for a, b in zip(ids[i, :SHOWN_IDS].tolist(), p[i, :SHOWN_IDS], strict=True)
            if b > 0
        )
        lines.append(f"{i:8}  {show(tokens[i]):16} {show(tokens[i + 1]):14} {chance:9} {likely}")
    if len(ids) > SHOWN_POSITIONS:
        lines.append(f"{'...':>8}  {len(ids) - SHOWN_POSITIONS} more positions")
    return lines
