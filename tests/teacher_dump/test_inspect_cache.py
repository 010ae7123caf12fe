"""What `inspect` says: figures of records whose figures are known, and a row as text."""

import dataclasses
import re

import numpy as np
import pytest

from shared.cache import CacheReader, plan_shards
from shared.errors import DamagedError, UsageError
from shared.records import Row, Sample, TopK
from shared.shardfile import FORMAT_VERSION, Shard, write_shard
from shared.sidecar import write_sidecar
from shared.store import open_store
from teacher_dump.dump import dump
from teacher_dump.inspect_cache import inspect_cache
from teacher_dump.teacher import load_tokenizer, tokenizer_files

TOKENS = np.array([5, 7, 9, 7, 5], np.int32)
NEXT_IS = [0, 1, 2, 1]  # rank of the next token among the ids at each position; of 2 there are none


def planted(folder, tokenizer_dir, record):
    """A cache of 3 equal train rows and one of validation."""
    kind = "topk" if isinstance(record, TopK) else "sample"
    fingerprint = {
        "format": FORMAT_VERSION,
        "kind": kind,
        "k": 2,
        "vocab_size": 320,
        "teacher": {"name": "planted"},
        "tokenizer_sha256": "aa",
        "rows": {"train": 3, "validation": 1},
    }
    store = open_store(folder)
    rows = [Row(number, TOKENS, record) for number in range(3)]
    write_shard(store, plan_shards("train", 3, 1)[0], fingerprint, [rows])
    write_shard(store, Shard("validation", 0, 1, 0, 1), fingerprint, [rows[:1]])
    write_sidecar(store, fingerprint, tokenizer_files(tokenizer_dir))
    return store


def planted_ids():
    """At position i: NEXT_IS[i] says where token i + 1 stands, 20 and 21 fill the rest."""
    ids = np.tile(np.array([20, 21], np.int32), (4, 1))
    for position, rank in enumerate(NEXT_IS):
        if rank < 2:
            ids[position, rank] = TOKENS[position + 1]
    return ids


def figures(lines, label):
    """The numbers of the line that begins with `label`."""
    [line] = [line for line in lines if line.startswith(f"{label:12}")]
    return [float(number) for number in re.findall(r"\d+\.\d+|\d+", line)]


def test_figures_of_planted_records(tmp_path, tokenizer_dir):
    """Probabilities of about 1/2 and 1/4 and a tail of 1/4, in whole steps of 1/32 nat."""
    steps = np.array([22, 44, 44]) / 32
    record = TopK(
        planted_ids(),
        np.tile(-steps[:2].astype(np.float32), (4, 1)),
        np.full(4, 2, np.int32),
        np.full(4, -steps[2], np.float32),
        np.zeros(4, np.float32),
    )
    lines = inspect_cache(planted(tmp_path, tokenizer_dir, record), "train", 256, 1)
    p = np.exp(-steps)
    assert figures(lines, "ids") == [2, 2, 2]
    assert figures(lines, "entropy") == [round((p * steps).sum(), 3)]
    assert figures(lines, "mass") == pytest.approx([p[0], 1, p[2]], abs=5e-5)  # at k = 1; tail
    assert figures(lines, "text") == [25.0, 75.0, round((steps[0] + 2 * steps[1]) / 3, 3)]
    text = "\n".join(lines)
    assert "3 rows of train, 12 positions" in text
    assert "row 1 of train, 5 tokens:" in text
    show = load_tokenizer(tokenizer_dir).decode
    rows = lines[-4:]
    for i, line in enumerate(rows):
        assert line.split()[0] == str(i)
        assert f'"{show([TOKENS[i]])}"' in line
        assert f'"{show([record.ids[i, 0]])}" 0.503  "{show([record.ids[i, 1]])}" 0.253' in line
    assert [("0.503 " in r[40:56], "0.253 " in r[40:56], "not kept" in r) for r in rows] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (False, True, False),
    ]


def test_figures_of_planted_draws(tmp_path, tokenizer_dir):
    """3 of 4 draws are the second id, so that is the likeliest."""
    record = Sample(planted_ids(), np.tile(np.array([1, 3], np.int32), (4, 1)))
    lines = inspect_cache(planted(tmp_path, tokenizer_dir, record), "validation", 256, 0)
    p = np.array([0.75, 0.25])
    assert figures(lines, "ids") == [2, 2, 2]
    assert figures(lines, "entropy") == [round(-(p * np.log(p)).sum(), 3)]
    assert figures(lines, "mass") == [0.75, 1]
    assert figures(lines, "text") == [
        50.0,
        75.0,
        round(-(np.log(0.25) + 2 * np.log(0.75)) / 3, 3),
    ]


@pytest.mark.parametrize("kind", ["topk", "tokens"])
def test_a_dump_is_described(dump_config, tmp_path, kind):
    store = open_store(tmp_path)
    dump(dataclasses.replace(dump_config, kind=kind), store)
    lines = inspect_cache(store, "train", 50, 3)
    text = "\n".join(lines)
    row = CacheReader(store, "train").row(3)
    assert f"kind              {kind}" in text
    assert f"row 3 of train, {len(row.tokens)} tokens:" in text
    assert ("entropy" in text) == (kind == "topk")
    [sizes] = [line for line in lines if line.startswith("bytes per token: ")]
    [total] = [line for line in lines if " train: " in line]
    parts = [float(number) for number in re.findall(r" (\d+\.\d+)", sizes)]
    assert sum(parts) == pytest.approx(float(total.split()[-2]), abs=0.1)
    assert ("drops" in sizes) == (kind == "topk")


@pytest.mark.parametrize("row", [-1, 100000])
def test_no_such_row(cache_dir, row):
    rows = len(CacheReader(cache_dir, "validation"))
    with pytest.raises(UsageError, match=f"row: found {row}, expected 0 to {rows - 1} in valid"):
        inspect_cache(open_store(cache_dir), "validation", 10, row)


def test_a_damaged_cache_is_refused(cache):
    (cache / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DamagedError, match="missing train-00001-of-00002.parquet"):
        inspect_cache(open_store(cache), "train", 10, 0)
