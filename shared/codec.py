"""Rows <-> the columns of a Parquet row group. All numbers are plain integers.

    row         int64            global row number
    tokens      list<int32>      [T]
    vocabulary  list<int32>      distinct ids of the group, roughly by falling count; in the group's
                                 first row only. `ids` are indices into it
    kept        list<uint16>     [T-1]  ids of each position
    ids         list<int32>      [sum(kept)]
    tail        list<uint16>     [T-1]  topk: -32 * tail_logprob; 65535: no tail
    logsumexp   list<int32>      [T-1]  topk: 32 * logsumexp
    drops       list<uint16>     [sum(kept)]  topk: how far -32 * logprob rises from the id before
    counts      list<uint16>     [sum(kept)]  sample: draws of each id

`ids`, `drops` and `counts` of a row lie rank by rank: the first entry of every position, then the
second of every position that has one, and so on. Neighbours are then alike, which is what zstd
lives on. Frequent ids have small indices for the same reason. For `sample`, ids rise within a
position and are stored as the difference from the one before.

Log-probabilities and logsumexp are rounded to 1/32 nat, so each is off by at most 1/64.
"""

import numpy as np
import pyarrow as pa

from shared.records import Row, Sample, TopK

STEP = 1 / 32  # nats
QUANTISER = "log-probabilities in steps of 1/32 nat"
NO_TAIL = 65535
MAX_VOCAB = 1 << 24

_TYPES = {
    "row": pa.int64(),
    "tokens": pa.int32(),
    "vocabulary": pa.int32(),
    "kept": pa.uint16(),
    "ids": pa.int32(),
    "tail": pa.uint16(),
    "logsumexp": pa.int32(),
    "drops": pa.uint16(),
    "counts": pa.uint16(),
}
_RECORD_COLUMNS = {
    "tokens": (),
    "topk": ("vocabulary", "kept", "ids", "tail", "logsumexp", "drops"),
    "sample": ("vocabulary", "kept", "ids", "counts"),
}


def schema(kind: str) -> pa.Schema:
    """Arrow schema of a shard of this record kind; nothing is nullable."""
    lists = [
        pa.field(name, pa.list_(pa.field("element", _TYPES[name], nullable=False)), nullable=False)
        for name in ("tokens", *_RECORD_COLUMNS[kind])
    ]
    return pa.schema([pa.field("row", pa.int64(), nullable=False), *lists])


def encodings(kind: str) -> dict[str, str]:
    """Parquet encoding of each column: bytes of equal weight together, sorted runs as deltas."""
    names = [f"{name}.list.element" for name in ("tokens", *_RECORD_COLUMNS[kind])]
    deltas = {"row": "DELTA_BINARY_PACKED", "vocabulary.list.element": "DELTA_BINARY_PACKED"}
    return {name: "BYTE_STREAM_SPLIT" for name in names} | {
        name: encoding for name, encoding in deltas.items() if name in ("row", *names)
    }


def encode(rows: list[Row], kind: str) -> pa.Table:
    """One row group as a table with `schema(kind)`."""
    columns: dict[str, list[np.ndarray]] = {"tokens": [row.tokens for row in rows]}
    records = [row.record for row in rows]
    if kind != "tokens":
        vocabulary, index = _vocabulary(records)
        columns["vocabulary"] = [vocabulary] + [vocabulary[:0]] * (len(rows) - 1)
        encode_record = _encode_topk if kind == "topk" else _encode_sample
        parts = [encode_record(record, index) for record in records]
        columns |= {name: [part[name] for part in parts] for name in parts[0]}
    numbers = pa.array([row.number for row in rows], pa.int64())
    lists = [_lists(columns[field.name], field.type) for field in list(schema(kind))[1:]]
    return pa.table([numbers, *lists], schema=schema(kind))


class Group:
    """A row group as read from Parquet; rows are unpacked one at a time, on demand.

    Raises ValueError, here or in `row`, if the columns do not fit each other.
    """

    def __init__(self, table: pa.Table, kind: str) -> None:
        self._kind = kind
        self._numbers = table["row"].to_numpy()
        self._lists = {
            name: _arrays(table[name].combine_chunks())
            for name in ("tokens", *_RECORD_COLUMNS[kind])
        }

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> Row:
        """The group's row at `index`."""
        columns = {name: arrays[index] for name, arrays in self._lists.items()}
        record = None
        if self._kind != "tokens":
            vocabulary = self._lists["vocabulary"][0]
            decode_record = _decode_topk if self._kind == "topk" else _decode_sample
            record = decode_record(columns, vocabulary)
            if len(columns["kept"]) != max(0, len(columns["tokens"]) - 1):
                raise ValueError("records and tokens of a row differ in number")
        return Row(int(self._numbers[index]), columns["tokens"], record)


def _vocabulary(records: list[TopK | Sample]) -> tuple[np.ndarray, np.ndarray]:
    """(distinct ids by falling power of two of their count, then by id; index of each id).

    The power of two is enough to make small indices frequent, and longer sorted runs are smaller.
    """
    every = np.concatenate([record.ids.ravel() for record in records])
    counts = np.bincount(every)
    ids = np.flatnonzero(counts)
    power = np.frexp(counts[ids])[1]
    vocabulary = ids[np.argsort(-power, kind="stable")].astype(np.int32)
    index = np.zeros(len(counts), np.int32)
    index[vocabulary] = np.arange(len(vocabulary), dtype=np.int32)
    return vocabulary, index


def _encode_topk(record: TopK, index: np.ndarray) -> dict[str, np.ndarray]:
    steps = np.rint(record.logprobs.T * np.float32(-1 / STEP))
    steps = np.minimum(steps, NO_TAIL, out=steps).astype(np.int32)
    tail = np.minimum(np.rint(record.tail_logprob / -STEP), NO_TAIL)  # rounding: never below 0
    return {
        "kept": record.kept,
        "ids": _flat(index[record.ids.T], record.kept),
        "drops": _flat(np.diff(steps, axis=0, prepend=0), record.kept),
        "tail": np.maximum(tail, 0),
        "logsumexp": np.rint(record.logsumexp / STEP),
    }


def _decode_topk(columns: dict[str, np.ndarray], vocabulary: np.ndarray) -> TopK:
    kept = columns["kept"].astype(np.int32)
    ids = vocabulary[_matrix(columns["ids"], kept)]
    logprobs = _nats(_matrix(columns["drops"], kept).cumsum(axis=1, dtype=np.int32), -STEP)
    if len(columns["ids"]) < ids.size:
        padding = np.arange(ids.shape[1]) >= kept[:, None]
        ids = np.where(padding, ids[:, :1], ids)
        logprobs[padding] = -np.inf
    tail = _nats(columns["tail"], -STEP)
    tail[columns["tail"] == NO_TAIL] = -np.inf
    return TopK(ids, logprobs, kept, tail, _nats(columns["logsumexp"], STEP))


def _nats(steps: np.ndarray, step: float) -> np.ndarray:
    return np.multiply(steps, step, dtype=np.float32)


def _encode_sample(record: Sample, index: np.ndarray) -> dict[str, np.ndarray]:
    kept = (record.counts > 0).sum(axis=1)
    ranks = np.where(record.counts > 0, index[record.ids], len(index))
    order = np.argsort(ranks, axis=1)
    ranks, counts = (np.take_along_axis(a, order, axis=1).T for a in (ranks, record.counts))
    return {
        "kept": kept,
        "ids": _flat(np.diff(ranks, axis=0, prepend=0), kept),
        "counts": _flat(counts, kept),
    }


def _decode_sample(columns: dict[str, np.ndarray], vocabulary: np.ndarray) -> Sample:
    kept = columns["kept"].astype(np.int32)
    ids = vocabulary[_matrix(columns["ids"], kept).cumsum(axis=1, dtype=np.int32)]
    return Sample(ids, _matrix(columns["counts"], kept).astype(np.int32))


def _flat(matrix: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The entries [rank, position] with rank < kept[position], rank by rank."""
    if (kept == len(matrix)).all():
        return matrix.ravel()
    return matrix[np.arange(len(matrix))[:, None] < kept]


def _matrix(flat: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The inverse of `_flat`, transposed, zero where there is no entry: [positions, max(kept)]."""
    shape = int(kept.max(initial=1)), len(kept)
    if len(flat) != kept.sum():
        raise ValueError(f"found {len(flat)} entries where {kept.sum()} are announced")
    if len(flat) == shape[0] * shape[1]:
        matrix = flat.reshape(shape)
    else:
        matrix = np.zeros(shape, flat.dtype)
        matrix[np.arange(shape[0])[:, None] < kept] = flat
    return np.ascontiguousarray(matrix.T)  # cumsum over the other axis is ten times slower


def _lists(arrays: list[np.ndarray], type_: pa.ListType) -> pa.Array:
    """Numpy arrays as one Arrow list column, without a Python object per number."""
    offsets = np.cumsum([0] + [len(array) for array in arrays]).astype(np.int32)
    values = np.concatenate(arrays).astype(type_.value_type.to_pandas_dtype(), copy=False)
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=type_)


def _arrays(column: pa.ListArray) -> list[np.ndarray]:
    """The inverse of `_lists`: views into the column's values, one per row."""
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
