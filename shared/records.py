"""Records: what the cache stores for each token position, and their Parquet columns.

A row of T tokens has T - 1 records; record i is the teacher's distribution over token i + 1, given
tokens 0..i. So a record and its label share an index and there is nothing to shift.

Kind `topk`, per position: the k most probable ids in falling order, their natural-log
probabilities, the log of the probability outside them (the tail, computed, not 1 - sum), and the
logsumexp of the raw logits, so that raw logits are `logprobs + logsumexp`.
Kind `tokens` stores token ids alone, for training without a teacher.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

KINDS = ("topk", "tokens")


@dataclass(frozen=True)
class TopK:
    """Top-k records of one row; log-probabilities in nats."""

    ids: np.ndarray  # int32 [positions, k]
    logprobs: np.ndarray  # float32 [positions, k]; float16 on disk
    tail_logprob: np.ndarray  # float32 [positions]
    logsumexp: np.ndarray  # float32 [positions]


@dataclass(frozen=True)
class Row:
    """One document: its global row number within its split, tokens and records."""

    number: int
    tokens: np.ndarray  # int32 [T]
    record: TopK | None


def schema(kind: str) -> pa.Schema:
    """Arrow schema of a shard. Lists are per row; `ids` and `logprobs` hold [positions, k] flat."""
    fields = [
        ("row", pa.int64()),
        ("length", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
    ]
    if kind == "topk":
        fields += [
            ("ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float16())),
            ("tail_logprob", pa.list_(pa.float32())),
            ("logsumexp", pa.list_(pa.float32())),
        ]
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in fields])


def to_table(rows: list[Row], kind: str) -> pa.Table:
    """Pack rows as an Arrow table with `schema(kind)`."""
    columns: dict[str, pa.Array] = {
        "row": pa.array([row.number for row in rows], pa.int64()),
        "length": pa.array([len(row.tokens) for row in rows], pa.int32()),
        "tokens": _lists([row.tokens for row in rows], pa.int32()),
    }
    if kind == "topk":
        records = [row.record for row in rows]
        columns["ids"] = _lists([r.ids.ravel() for r in records], pa.int32())
        half = [r.logprobs.ravel().astype(np.float16) for r in records]
        columns["logprobs"] = _lists(half, pa.float16())
        columns["tail_logprob"] = _lists([r.tail_logprob for r in records], pa.float32())
        columns["logsumexp"] = _lists([r.logsumexp for r in records], pa.float32())
    return pa.table(columns, schema=schema(kind))


def from_table(table: pa.Table, kind: str, k: int) -> list[Row]:
    """Unpack a table with `schema(kind)`; the inverse of `to_table` up to float16.

    Raises ValueError if a row's lists are not as long as its length says: Parquet's checksums
    cover pages, not the page headers, where a flipped bit can drop the last values.
    """
    columns = {name: table[name].combine_chunks() for name in schema(kind).names}
    _check_lengths(columns, k)
    numbers = columns["row"].to_numpy()
    tokens = _arrays(columns["tokens"])
    if kind == "tokens":
        return [Row(int(n), t, None) for n, t in zip(numbers, tokens, strict=True)]
    parts = zip(
        *(_arrays(columns[name]) for name in ("ids", "logprobs", "tail_logprob", "logsumexp")),
        strict=True,
    )
    records = [
        TopK(ids.reshape(-1, k), logprobs.astype(np.float32).reshape(-1, k), tail, lse)
        for ids, logprobs, tail, lse in parts
    ]
    return [Row(int(n), t, r) for n, t, r in zip(numbers, tokens, records, strict=True)]


def _check_lengths(columns: dict[str, pa.Array], k: int) -> None:
    tokens = columns["length"].to_numpy()
    positions = np.maximum(tokens - 1, 0)
    for name, column in columns.items():
        if name in ("row", "length"):
            continue
        found = np.diff(column.offsets.to_numpy())
        expected = {"tokens": tokens, "ids": positions * k, "logprobs": positions * k}
        if not np.array_equal(found, expected.get(name, positions)):
            raise ValueError(f"column {name} has lists of another length than its rows")


def _lists(arrays: list[np.ndarray], type_: pa.DataType) -> pa.Array:
    """Numpy arrays as one Arrow list column, without a Python object per number."""
    offsets = np.cumsum([0] + [len(array) for array in arrays]).astype(np.int32)
    values = pa.array(np.concatenate(arrays) if arrays else np.empty(0), type_)
    return pa.ListArray.from_arrays(offsets, values)


def _arrays(column: pa.ListArray) -> list[np.ndarray]:
    """The inverse of `_lists`: views into the column's values, one per row."""
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
