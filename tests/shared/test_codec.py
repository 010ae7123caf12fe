"""Rows survive packing: ids and counts exactly, log-probabilities to half a step."""

import numpy as np
import pyarrow as pa
import pytest

from shared.codec import MAX_VOCAB, STEP, Group, encode, schema
from shared.records import Row, Sample, TopK

HALF = STEP / 2
FLOAT32 = 1e-5  # what float32 may add to a rounding error


def topk_record(rng, positions, k, vocab, ids=None):
    """The best k of the softmax of random logits, whose spread differs between positions."""
    logits = rng.normal(0, rng.uniform(0.5, 6, (positions, 1)), (positions, vocab)) + 15
    lse = np.logaddexp.reduce(logits, axis=1)
    order = np.argsort(-logits, axis=1)
    logprobs = np.take_along_axis(logits, order, 1) - lse[:, None]
    tail = np.logaddexp.reduce(logprobs[:, k:], axis=1, initial=-np.inf)
    best = order[:, :k] if ids is None else ids[order[:, :k]]
    return TopK(
        best.astype(np.int32),
        logprobs[:, :k].astype(np.float32),
        np.full(positions, k, np.int32),
        tail.astype(np.float32),
        lse.astype(np.float32),
    )


def sample_record(rng, positions, draws, vocab):
    """Draws from a random distribution of each position, by falling count."""
    record = np.zeros((2, positions, draws), np.int32)
    for i in range(positions):
        drawn = rng.choice(vocab, draws, p=rng.dirichlet(np.full(vocab, 0.1)))
        ids, counts = np.unique(drawn, return_counts=True)
        order = np.argsort(-counts)
        record[0, i] = ids[order[0]]
        record[0, i, : len(ids)], record[1, i, : len(ids)] = ids[order], counts[order]
    width = max(1, (record[1] > 0).sum(1).max(initial=1))
    return Sample(record[0, :, :width], record[1, :, :width])


def make_rows(kind, lengths, seed=0, ragged=False):
    """Rows 7, 8, ... with random tokens and records over a vocabulary of 100."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths, 7):
        record = None
        if kind == "topk":
            record = topk_record(rng, length - 1, 12, 100)
            if ragged:
                record = record.keep(rng.integers(1, 13, length - 1))
        elif kind == "sample":
            record = sample_record(rng, length - 1, 20, 100)
        rows.append(Row(number, rng.integers(0, 100, length).astype(np.int32), record))
    return rows


def unpacked(rows, kind):
    """The rows after a round trip, read in reverse order."""
    group = Group(encode(rows, kind), kind)
    assert len(group) == len(rows)
    return [group.row(i) for i in reversed(range(len(rows)))][::-1]


def assert_close(read, written):
    """Within half a step of each other where finite, infinite in the same places."""
    assert read.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(read), np.isneginf(written))
    finite = np.isfinite(written)
    np.testing.assert_allclose(read[finite], written[finite], rtol=0, atol=HALF + FLOAT32)


def assert_same_topk(read, written):
    np.testing.assert_array_equal(read.kept, written.kept)
    if len(written.kept):
        np.testing.assert_array_equal(read.ids, written.ids)
        assert_close(read.logprobs, written.logprobs)
    assert_close(read.tail_logprob, written.tail_logprob)
    assert_close(read.logsumexp, written.logsumexp)
    assert read.ids.dtype == read.kept.dtype == np.int32
    assert len(read.ids) == len(written.ids)


def assert_same_sample(read, written):
    """The same ids with the same counts at each position; padding repeats one of them."""
    assert len(read.ids) == len(written.ids)
    assert read.ids.dtype == read.counts.dtype == np.int32
    for i in range(len(written.ids)):
        there, here = (
            dict(zip(ids[counts > 0].tolist(), counts[counts > 0].tolist(), strict=True))
            for ids, counts in ((r.ids[i], r.counts[i]) for r in (written, read))
        )
        assert here == there
        assert len(here) == (read.counts[i] > 0).sum()
        assert set(read.ids[i].tolist()) == set(here)
    np.testing.assert_array_equal(read.counts.sum(1), written.counts.sum(1))


LENGTHS = {
    "many": [9, 2, 1, 30, 5, 2, 1, 64],
    "one token": [1],
    "one token each": [1, 1, 1],
    "two tokens": [2],
    "one token first": [1, 17],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_topk_survives(lengths, ragged):
    rows = make_rows("topk", lengths, ragged=ragged)
    for read, written in zip(unpacked(rows, "topk"), rows, strict=True):
        assert read.number == written.number
        np.testing.assert_array_equal(read.tokens, written.tokens)
        assert_same_topk(read.record, written.record)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sample_survives(lengths):
    rows = make_rows("sample", lengths)
    for read, written in zip(unpacked(rows, "sample"), rows, strict=True):
        assert read.number == written.number
        np.testing.assert_array_equal(read.tokens, written.tokens)
        assert_same_sample(read.record, written.record)
        assert (read.record.counts.sum(1) == 20).all()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_tokens_survive(lengths):
    rows = make_rows("tokens", lengths)
    for read, written in zip(unpacked(rows, "tokens"), rows, strict=True):
        assert (read.number, read.record) == (written.number, None)
        np.testing.assert_array_equal(read.tokens, written.tokens)
        assert read.tokens.dtype == np.int32


@pytest.mark.parametrize("kind", ["topk", "sample"])
def test_ids_of_24_bits_survive(kind):
    rng = np.random.default_rng(3)
    ids = np.append(rng.integers(0, MAX_VOCAB, 299), MAX_VOCAB - 1).astype(np.int32)
    row = make_rows(kind, [30])[0]
    if kind == "topk":
        record = topk_record(rng, 29, 12, 300, ids=np.unique(ids))
        record.ids[5, 3] = MAX_VOCAB - 1
        read = unpacked([Row(0, row.tokens, record)], kind)[0].record
        assert_same_topk(read, record)
    else:
        record = Sample(ids[row.record.ids + 200], row.record.counts)
        assert record.ids.max() == MAX_VOCAB - 1
        read = unpacked([Row(0, row.tokens, record)], kind)[0].record
        assert_same_sample(read, record)


def test_what_has_no_probability_and_what_has_all_of_it():
    infinite = np.float32(-np.inf)
    record = TopK(
        np.array([[3, 1], [4, 2], [9, 8]], np.int32),
        np.array([[0, infinite], [-0.7, -0.7], [-1e-9, -90]], np.float32),
        np.array([2, 2, 2], np.int32),
        np.array([infinite, infinite, -200.01], np.float32),
        np.array([-1000.3, 0, 12345.6], np.float32),
    )
    read = unpacked([Row(0, np.arange(4, dtype=np.int32), record)], "topk")[0].record
    np.testing.assert_array_equal(read.ids, record.ids)
    assert read.logprobs[0, 1] <= -2000
    assert np.exp(read.logprobs[0, 1]) == 0
    assert_close(read.logprobs[1:], record.logprobs[1:])
    np.testing.assert_array_equal(np.isneginf(read.tail_logprob), [True, True, False])
    assert_close(read.tail_logprob, record.tail_logprob)
    np.testing.assert_allclose(read.logsumexp, record.logsumexp, rtol=0, atol=HALF + 1e-3)
    assert (read.logprobs <= 0).all()


def test_a_tail_of_nearly_everything_is_not_no_tail():
    record = TopK(
        np.array([[0]], np.int32),
        np.array([[-9]], np.float32),
        np.array([1], np.int32),
        np.array([-1.2e-4], np.float32),
        np.zeros(1, np.float32),
    )
    read = unpacked([Row(0, np.arange(2, dtype=np.int32), record)], "topk")[0].record
    assert read.tail_logprob[0] == 0


def test_rounding_costs_almost_no_divergence():
    record = topk_record(np.random.default_rng(5), 4000, 32, 500)
    row = Row(0, np.zeros(4001, np.int32), record)
    read = unpacked([row], "topk")[0].record
    p, q = (
        np.concatenate([r.logprobs, r.tail_logprob[:, None]], axis=1).astype(np.float64)
        for r in (record, read)
    )
    q -= np.logaddexp.reduce(q, axis=1)[:, None]
    divergence = (np.exp(p) * (p - q)).sum(1)
    assert divergence.min() > -1e-6
    assert 1e-6 < divergence.mean() < 4e-5


def changed(table, name, values):
    """The table with the first row's `values` in the place of those of column `name`."""
    index = table.schema.get_field_index(name)
    column = pa.array([values, *table[name].to_pylist()[1:]], table.schema.field(name).type)
    return table.set_column(index, table.schema.field(name), column)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("topk", "tokens"),
        ("topk", "kept"),
        ("topk", "ids"),
        ("topk", "drops"),
        ("sample", "tokens"),
        ("sample", "kept"),
        ("sample", "ids"),
        ("sample", "counts"),
    ],
)
def test_columns_that_do_not_fit_are_refused(kind, name):
    table = encode(make_rows(kind, [9, 5]), kind)
    values = table[name].to_pylist()[0]
    assert changed(table, name, values).equals(table)
    for bad in (values[:-1], values + values[-1:], []):
        with pytest.raises(ValueError, match=r"\d|differ in number"):
            Group(changed(table, name, bad), kind).row(0)
        Group(changed(table, name, bad), kind).row(1)  # the other row is whole


def test_a_ragged_row_may_not_have_the_ids_of_a_full_one():
    table = encode(make_rows("topk", [9], ragged=True), "topk")
    kept, ids = (table[name].to_pylist()[0] for name in ("kept", "ids"))
    full = max(kept) * len(kept)
    assert len(ids) == sum(kept) < full
    with pytest.raises(ValueError, match=f"{full} entries where {sum(kept)} are announced"):
        Group(changed(table, "ids", [0] * full), "topk").row(0)


@pytest.mark.parametrize("kind", ["topk", "sample", "tokens"])
def test_columns_are_plain_integers(kind):
    table = encode(make_rows(kind, [9, 5]), kind)
    assert table.schema == schema(kind)
    for field in table.schema:
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        assert pa.types.is_integer(inner)
        assert table[field.name].null_count == 0
