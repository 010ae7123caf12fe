"""Shards are ordinary Parquet files: other tools open them, and NumPy unpacks them."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from shared.cache import CacheReader
from shared.store import open_store

COLUMNS = ["row", "tokens", "ids"]

# Given `path`, a shard that keeps k ids at every position.
NUMPY_SNIPPET = """
import pyarrow.parquet as pq

group = pq.ParquetFile(path).read_row_group(0)  # 64 documents; this unpacks the first
vocabulary, ids, drops = (
    group[name][0].values.to_numpy() for name in ("vocabulary", "ids", "drops")
)
positions = len(group["tokens"][0]) - 1
ids = vocabulary[ids.reshape(-1, positions)].T  # [T-1, k], the best first
logprobs = drops.reshape(-1, positions).cumsum(axis=0).T / -32  # [T-1, k], in nats
"""


def shards(cache, split="train"):
    return f"{cache}/{split}-*.parquet"


@pytest.fixture(scope="module")
def table(cache_dir):
    """COLUMNS of all train shards as pyarrow reads them."""
    table = pq.read_table(sorted(cache_dir.glob("train-*.parquet")), columns=COLUMNS)
    assert table.num_rows > 100
    assert table["row"].to_pylist() == list(range(table.num_rows))
    return table


def test_datasets(cache_dir, table, tmp_path):
    import datasets

    files = {split: shards(cache_dir, split) for split in ("train", "validation")}
    loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))
    assert loaded["train"].select_columns(COLUMNS)[:] == table.to_pydict()
    validation = CacheReader(open_store(cache_dir), "validation")
    assert [len(tokens) for tokens in loaded["validation"]["tokens"]] == validation.lengths.tolist()


def test_datasets_streaming(cache_dir, table):
    import datasets

    files = {"train": shards(cache_dir)}
    stream = datasets.load_dataset("parquet", data_files=files, streaming=True)["train"]
    assert list(stream.select_columns(COLUMNS).take(100)) == table.slice(0, 100).to_pylist()


def test_duckdb(cache_dir, table):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        query = f"select count(*), sum(len(tokens)) from '{shards(cache_dir)}'"
        [(rows, tokens)] = connection.execute(query).fetchall()
        query = f"select row, tokens, ids from '{shards(cache_dir)}' order by row"
        columns = zip(*connection.execute(query).fetchall(), strict=True)
    lengths = CacheReader(open_store(cache_dir), "train").lengths
    assert (rows, tokens) == (table.num_rows, lengths.sum())
    assert dict(zip(COLUMNS, map(list, columns), strict=True)) == table.to_pydict()


def test_polars(cache_dir, table):
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(shards(cache_dir), columns=COLUMNS).sort("row")
    assert frame.to_dict(as_series=False) == table.to_pydict()


def test_numpy_unpacks_a_document_in_a_few_lines(cache_dir):
    lines = [line for line in NUMPY_SNIPPET.splitlines() if line]
    assert len(lines) < 10
    assert "shared" not in NUMPY_SNIPPET
    reader = CacheReader(open_store(cache_dir), "train")
    for path in sorted(cache_dir.glob("train-*.parquet")):
        found = {"path": path}
        exec(NUMPY_SNIPPET, found)
        row = reader.row(pq.read_table(path)["row"][0].as_py())
        assert found["ids"].shape == (len(row.tokens) - 1, 8)
        np.testing.assert_array_equal(found["ids"], row.record.ids)
        np.testing.assert_array_equal(found["logprobs"], row.record.logprobs)
        mass = np.exp(found["logprobs"]).sum(axis=1) + np.exp(row.record.tail_logprob)
        np.testing.assert_allclose(mass, 1, atol=0.016)
        assert len(row.tokens) > 2
