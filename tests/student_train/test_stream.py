"""The data order is a pure function, its batches are aligned, and its thread reports errors."""

import numpy as np
import pytest

from shared.cache import CacheReader, shard_paths
from shared.errors import DamagedError
from student_train.stream import EpochOrders, collate, epoch_order, step_rows, training_batches


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


def test_each_row_group_is_decoded_once_per_epoch(cache_dir, monkeypatch):
    reader = CacheReader(cache_dir, "train")
    decoded = []
    real = reader._decode
    monkeypatch.setattr(reader, "_decode", lambda s, g: decoded.append((s, g)) or real(s, g))
    steps = range(len(reader) // 4)
    for _ in training_batches(reader, 0, steps, 4, 4, 0, 1):
        pass
    assert len(decoded) == len(set(decoded)) >= 4


def test_a_damaged_page_stops_training_with_its_error(cache):
    reader = CacheReader(cache, "train")
    path = shard_paths(cache)[0]
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=path.name):
        for _ in training_batches(reader, 0, range(60), 4, 4, 0, 1):
            pass
