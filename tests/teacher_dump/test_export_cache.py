"""Exported caches: the same values in plain lists, with a row's padding left out."""

import dataclasses
import json

import numpy as np
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from shared.cache import CacheReader, plan_shards
from shared.errors import UsageError
from shared.records import Row, TopK
from shared.shardfile import FORMAT_VERSION, Shard, write_shard
from shared.store import open_store
from teacher_dump.dump import dump
from teacher_dump.export_cache import EXPORT_KEY, export_cache


def lists(array, kept):
    return [values[:count].tolist() for values, count in zip(array, kept, strict=True)]


def expected(row):
    """A row as a line of an export."""
    record, line = row.record, {"row": row.number, "tokens": row.tokens.tolist()}
    if isinstance(record, TopK):
        return line | {
            "ids": lists(record.ids, record.kept),
            "logprobs": lists(record.logprobs, record.kept),
            "tail_logprob": record.tail_logprob.tolist(),
            "logsumexp": record.logsumexp.tolist(),
        }
    if record is not None:
        drawn = (record.counts > 0).sum(1)
        line |= {"ids": lists(record.ids, drawn), "counts": lists(record.counts, drawn)}
    return line


@pytest.mark.parametrize(
    ("changes", "k"),
    [
        ({}, None),
        ({}, 3),
        ({"min_prob": 0.02}, None),
        ({"kind": "sample"}, None),
        ({"kind": "tokens"}, None),
    ],
)
def test_every_row_is_exported_as_it_is_read(dump_config, tmp_path, changes, k):
    cache, out = open_store(tmp_path / "cache"), open_store(tmp_path / "plain")
    config = dataclasses.replace(dump_config, max_rows=90, max_validation_rows=5, **changes)
    dump(config, cache)
    lines = export_cache(cache, out, k)
    assert lines[0] == f"{out}/train-00000-of-00002.parquet: 45 rows"
    assert out.names() == [name for name in cache.names() if name.endswith(".parquet")]
    for split, rows in (("train", 90), ("validation", 5)):
        reader = CacheReader(cache, split, k)
        files = sorted((tmp_path / "plain").glob(f"{split}-*"))
        found = pads.dataset(files).to_table().to_pylist()
        assert len(found) == rows
        assert found == [expected(reader.row(number)) for number in range(rows)]
    about = json.loads(pq.read_schema(files[0]).metadata[EXPORT_KEY.encode()])
    assert about == {**reader.fingerprint, "exported_k": k}
    if changes.get("min_prob"):
        counts = {len(ids) for line in found for ids in line["ids"]}
        assert len(counts) > 1
        assert max(counts) <= config.k


def test_documents_without_positions_are_exported(tmp_path):
    """One token has no next one: no position, in a row group that has none either."""
    cache, none = open_store(tmp_path / "cache"), np.empty(0, np.float32)
    fingerprint = {
        "format": FORMAT_VERSION,
        "kind": "topk",
        "k": 4,
        "vocab_size": 9,
        "rows": {"train": 2, "validation": 1},
    }
    record = TopK(np.empty((0, 4), np.int32), none.reshape(0, 4), none.astype(np.int32), none, none)
    rows = [Row(number, np.array([number], np.int32), record) for number in range(2)]
    write_shard(cache, plan_shards("train", 2, 1)[0], fingerprint, [rows])
    write_shard(cache, Shard("validation", 0, 1, 0, 1), fingerprint, [rows[:1]])
    out = open_store(tmp_path / "plain")
    export_cache(cache, out, None)
    table = pq.read_table(tmp_path / "plain" / "train-00000-of-00001.parquet")
    assert table["tokens"].to_pylist() == [[0], [1]]
    assert table["ids"].to_pylist() == table["logsumexp"].to_pylist() == [[], []]


def test_what_cannot_be_exported_writes_nothing(cache_dir, tmp_path):
    cache, out = open_store(cache_dir), open_store(tmp_path / "plain")
    for k in (9, 100):
        with pytest.raises(UsageError, match=f"k: found {k}, but .* holds k = 8"):
            export_cache(cache, out, k)
    assert not out.is_folder()
    before = cache.names()
    with pytest.raises(UsageError, match=f"{cache_dir} is not empty: give --out a new folder"):
        export_cache(cache, cache, None)
    assert cache.names() == before
    with pytest.raises(UsageError, match="no cache at"):
        export_cache(out, open_store(tmp_path / "other"), None)
