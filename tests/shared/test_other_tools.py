"""Shards are ordinary Parquet files: other tools open them, and NumPy unpacks them."""

import re
from pathlib import Path

import duckdb
import numpy as np
import polars
import pyarrow.parquet as pq
import pytest

from shared.cache import CacheReader
from shared.store import open_store

COLUMNS = ["row", "tokens", "ids"]

README = Path(__file__).parents[2] / "README.md"


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
    with duckdb.connect() as connection:
        query = f"select count(*), sum(len(tokens)) from '{shards(cache_dir)}'"
        [(rows, tokens)] = connection.execute(query).fetchall()
        query = f"select row, tokens, ids from '{shards(cache_dir)}' order by row"
        columns = zip(*connection.execute(query).fetchall(), strict=True)
    lengths = CacheReader(open_store(cache_dir), "train").lengths
    assert (rows, tokens) == (table.num_rows, lengths.sum())
    assert dict(zip(COLUMNS, map(list, columns), strict=True)) == table.to_pydict()


def test_polars(cache_dir, table):
    frame = polars.read_parquet(shards(cache_dir), columns=COLUMNS).sort("row")
    assert frame.to_dict(as_series=False) == table.to_pydict()


def test_the_readmes_numpy_unpacks_a_document(cache_dir):
    [snippet] = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len([line for line in snippet.splitlines() if line]) < 10
    assert "shared" not in snippet
    code, paths = re.subn('path = ".*"', "", snippet)
    assert paths == 1
    reader = CacheReader(open_store(cache_dir), "train")
    for path in sorted(cache_dir.glob("train-*.parquet")):
        found = {"path": path}
        exec(code, found)
        row = reader.row(pq.read_table(path)["row"][0].as_py())
        assert found["ids"].shape == (len(row.tokens) - 1, 8)
        np.testing.assert_array_equal(found["ids"], row.record.ids)
        np.testing.assert_array_equal(found["logprobs"], row.record.logprobs)
        mass = np.exp(found["logprobs"]).sum(axis=1) + np.exp(row.record.tail_logprob)
        np.testing.assert_allclose(mass, 1, atol=0.016)
        assert len(row.tokens) > 2
