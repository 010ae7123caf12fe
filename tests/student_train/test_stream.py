"""The data order is a pure function, its batches are aligned, and its thread reports errors."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.cache import CacheReader, plan_shards
from shared.errors import DamagedError
from shared.records import Row, Sample
from shared.shardfile import FORMAT_VERSION, GROUP_ROWS, write_shard
from shared.store import open_store
from student_train.stream import EpochOrders, collate, epoch_order, step_rows, training_batches

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 5000])
def test_an_epoch_visits_every_row_once_in_a_seeded_order(rows):
    order = epoch_order(7, 0, rows)
    assert sorted(order) == list(range(rows))
    assert np.array_equal(order, epoch_order(7, 0, rows))
    if rows > 60:
        assert not np.array_equal(order, epoch_order(8, 0, rows))
        assert not np.array_equal(order, epoch_order(7, 1, rows))


def test_steps_go_over_epochs_without_a_gap():
    orders = EpochOrders(0, 10)
    rows = np.concatenate([step_rows(orders, step, 4) for step in range(5)])
    expected = np.concatenate([epoch_order(0, 0, 10), epoch_order(0, 1, 10)])
    assert np.array_equal(rows, expected)
    assert np.array_equal(step_rows(EpochOrders(0, 10), 3, 4), expected[12:16])


def test_each_position_is_paired_with_the_next_token_and_its_own_record(cache_dir):
    reader = CacheReader(cache_dir, "train")
    rows = [reader.row(n) for n in (3, 0, 11)]
    batch = collate(rows)
    at = 0
    for row in rows:
        for t in range(len(row.tokens) - 1):
            token = int(np.concatenate([r.tokens for r in rows])[int(batch.positions[at])])
            assert token == row.tokens[t]
            assert int(batch.targets.labels[at]) == row.tokens[t + 1]
            assert batch.targets.ids[at].tolist() == row.record.ids[t].tolist()
            assert float(batch.targets.tail_logprob[at]) == row.record.tail_logprob[t]
            at += 1
    assert at == len(batch.positions) == len(batch.targets.logprobs)


def test_ranks_and_micro_batches_only_slice_a_step(cache_dir):
    reader = CacheReader(cache_dir, "train")
    (alone,), targets = next(training_batches(reader, 0, range(2, 3), 8, 8, 0, 1))
    tokens = []
    for rank in range(2):
        micro, again = next(training_batches(reader, 0, range(2, 3), 8, 2, rank, 2))
        assert len(micro) == 2
        assert again == targets == len(alone.targets.labels)
        tokens += [batch.tokens for batch in micro]
    assert sorted(np.concatenate(tokens)) == sorted(alone.tokens.numpy())


def test_each_row_group_is_fetched_once_per_epoch(tmp_path, monkeypatch):
    """Also with more groups than the reader keeps."""
    rows = 64 * 70 + 10
    fingerprint = {
        "format": FORMAT_VERSION, "kind": "tokens", "vocab_size": 9, "rows": {"train": rows},
    }  # fmt: skip
    token_rows = [Row(n, np.full(2 + n % 3, n % 9, np.int32), None) for n in range(rows)]
    for shard in plan_shards("train", rows, 3):
        groups = range(shard.first_row, shard.end_row, GROUP_ROWS)
        chunks = [token_rows[n : min(n + GROUP_ROWS, shard.end_row)] for n in groups]
        write_shard(open_store(tmp_path), shard, fingerprint, chunks)
    reader = CacheReader(tmp_path, "train")
    fetched = []
    real = reader._fetch
    monkeypatch.setattr(reader, "_fetch", lambda s, g: fetched.append((s, g)) or real(s, g))
    for _ in training_batches(reader, 0, range(rows // 10), 10, 10, 0, 1):
        pass
    assert len(fetched) == len(set(fetched)) == 71


def test_rows_of_other_widths_are_padded_with_ids_they_hold(cache_dir):
    reader = CacheReader(cache_dir, "train")
    rows = [reader.row(n) for n in (3, 0, 11)]
    cut = [replace(row, record=row.record.keep(k)) for row, k in zip(rows, (2, 5, 1), strict=True)]
    targets = collate(cut).targets
    kept = np.concatenate([row.record.kept for row in cut])
    np.testing.assert_array_equal(targets.kept, kept)
    assert targets.ids.shape == (len(kept), 5)
    whole = np.concatenate([row.record.ids for row in rows])
    for i, m in enumerate(kept):
        assert targets.ids[i, :m].tolist() == whole[i, :m].tolist()
        assert set(targets.ids[i, m:].tolist()) <= set(whole[i, :m].tolist())
        assert torch.isfinite(targets.logprobs[i, :m]).all()


def test_draws_become_shares_without_a_tail():
    sample = Sample(np.array([[4, 7, 4], [2, 3, 9]], np.int32), np.array([[3, 1, 0], [1, 1, 2]]))
    row = Row(0, np.array([1, 2, 3], np.int32), sample)
    targets = collate([row]).targets
    assert targets.kept.tolist() == [2, 3]
    expected = [[0.75, 0.25, 0.0], [0.25, 0.25, 0.5]]
    torch.testing.assert_close(targets.logprobs.exp(), torch.tensor(expected))
    assert targets.tail_logprob.tolist() == [-np.inf] * 2


@pytest.mark.parametrize("end", ["break", "raise ValueError", "sys.exit()"])
def test_a_process_that_stops_reading_ends_by_itself(cache_dir, end):
    script = (
        "import sys\n"
        "from shared.cache import CacheReader\n"
        "from student_train.stream import training_batches\n"
        f"reader = CacheReader({str(cache_dir)!r}, 'train')\n"
        "batches = training_batches(reader, 0, range(10**6), 4, 4, 0, 1)\n"
        "for batch in batches:\n"
        f"    {end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True)
    assert done.returncode == (1 if "raise" in end else 0), done.stderr


def test_a_damaged_page_stops_training_with_its_error(cache):
    reader = CacheReader(cache, "train")
    path = cache / "train-00000-of-00002.parquet"
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=path.name):
        for _ in training_batches(reader, 0, range(60), 4, 4, 0, 1):
            pass
