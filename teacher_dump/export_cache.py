"""A cache as Parquet files of plain list columns, a line per document, for other programs.

The values are those of the cache (log-probabilities were rounded to 1/32 nat), the files a few
times as large. Their schema carries the cache's fingerprint under `stackgrow_export`.
"""

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shared.cache import CacheReader, read_footers
from shared.errors import UsageError
from shared.progress import progress
from shared.records import Row, TopK
from shared.shardfile import GROUP_ROWS, Footer
from shared.store import Store

EXPORT_KEY = "stackgrow_export"
COLUMNS = {
    "topk": {
        "ids": pa.list_(pa.list_(pa.int32())),  # [T-1][ids of the position], the best first
        "logprobs": pa.list_(pa.list_(pa.float32())),
        "tail_logprob": pa.list_(pa.float32()),  # [T-1]
        "logsumexp": pa.list_(pa.float32()),
    },
    "sample": {
        "ids": pa.list_(pa.list_(pa.int32())),
        "counts": pa.list_(pa.list_(pa.int32())),
    },
    "tokens": {},
}


def export_cache(cache: Store, out: Store, k: int | None) -> list[str]:
    """Write every shard of `cache` to `out` under its own name; a line for each.

    `k`: at most this many ids of each position; the rest joins the tail.
    Raises UsageError if `out` holds anything or `k` cannot be had, DamagedError for a bad cache.
    """
    footers = read_footers(cache)
    splits = sorted({footer.shard.split for footer in footers})
    readers = {split: CacheReader(cache, split, k, keep_groups=1) for split in splits}
    if out.names():
        raise UsageError(f"{out} is not empty: give --out a new folder")
    fingerprint = footers[0].fingerprint
    columns = {"row": pa.int64(), "tokens": pa.list_(pa.int32()), **COLUMNS[fingerprint["kind"]]}
    about = {EXPORT_KEY: json.dumps({**fingerprint, "exported_k": k})}
    schema = pa.schema(columns).with_metadata(about)
    lines = []
    with progress("rows", sum(len(footer.lengths) for footer in footers)) as advance:
        for footer in footers:
            name = footer.shard.name
            with (
                out.writing(name) as path,
                pq.ParquetWriter(path, schema, compression="zstd") as writer,
            ):
                for rows in _groups(readers[footer.shard.split], footer):
                    writer.write_table(pa.table(_columns(rows), schema=schema))
                    advance(len(rows), name)
            lines.append(f"{out.path(name)}: {len(footer.lengths)} rows")
    return lines


def _groups(reader: CacheReader, footer: Footer) -> Iterator[list[Row]]:
    first, end = footer.shard.first_row, footer.shard.end_row
    for start in range(first, end, GROUP_ROWS):
        yield [reader.row(number) for number in range(start, min(start + GROUP_ROWS, end))]


def _columns(rows: list[Row]) -> dict[str, pa.Array]:
    records = [row.record for row in rows]
    columns = {
        "row": pa.array([row.number for row in rows]),
        "tokens": _lists([row.tokens for row in rows]),
    }
    if records[0] is None:
        return columns
    is_topk = isinstance(records[0], TopK)
    kept = [record.kept if is_topk else (record.counts > 0).sum(1) for record in records]
    for name in ("ids", "logprobs") if is_topk else ("ids", "counts"):
        columns[name] = _nested([getattr(record, name) for record in records], kept)
    for name in ("tail_logprob", "logsumexp") if is_topk else ():
        columns[name] = _lists([getattr(record, name) for record in records])
    return columns


def _lists(arrays: list[np.ndarray]) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets(list(map(len, arrays))), np.concatenate(arrays))


def _nested(arrays: list[np.ndarray], kept: list[np.ndarray]) -> pa.ListArray:
    """Arrays [T-1, m] as lists of lists, without their padding."""
    values = [a[np.arange(a.shape[1]) < n[:, None]] for a, n in zip(arrays, kept, strict=True)]
    inner = pa.ListArray.from_arrays(_offsets(np.concatenate(kept)), np.concatenate(values))
    return pa.ListArray.from_arrays(_offsets(list(map(len, kept))), inner)


def _offsets(lengths: list[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
