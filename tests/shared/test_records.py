"""Top-k records: what is cut off joins the tail, and cuts fall where they should."""

import numpy as np
import pytest

from shared.records import TopK


def softmax_record(positions, k, vocab, seed=0):
    """Top-k records of random logits, and the logits' log-probabilities in float64."""
    logits = np.random.default_rng(seed).normal(0, 4, (positions, vocab))
    lse = np.logaddexp.reduce(logits, axis=1)
    logprobs = logits - lse[:, None]
    order = np.argsort(-logprobs, axis=1)
    best, rest = (np.take_along_axis(logprobs, order[:, s], 1) for s in (np.s_[:k], np.s_[k:]))
    tail = np.logaddexp.reduce(rest, axis=1, initial=-np.inf)
    ids, kept = order[:, :k].astype(np.int32), np.full(positions, k, np.int32)
    record = TopK(ids, *(a.astype(np.float32) for a in (best, kept, tail, lse)))
    return TopK(ids, record.logprobs, kept, record.tail_logprob, record.logsumexp), logprobs


def planted(*probabilities):
    """One position whose ids 10, 11, ... have these probabilities."""
    probabilities = np.array([probabilities], np.float64)
    k = probabilities.shape[1]
    tail = np.log(np.maximum(1e-9, 1 - probabilities.sum(1)))
    return TopK(
        np.arange(10, 10 + k, dtype=np.int32)[None],
        np.log(probabilities).astype(np.float32),
        np.array([k], np.int32),
        tail.astype(np.float32),
        np.zeros(1, np.float32),
    )


def cuts(record, kept):
    """Check that `record` is a proper record with `kept` ids at each position."""
    np.testing.assert_array_equal(record.kept, kept)
    assert record.ids.shape == record.logprobs.shape == (len(record.kept), record.kept.max())
    for i, n in enumerate(record.kept):
        assert set(record.ids[i, n:]) <= set(record.ids[i, :n])
        assert np.isneginf(record.logprobs[i, n:]).all()
        assert np.isfinite(record.logprobs[i, :n]).all()
    assert [a.dtype for a in vars(record).values()] == [
        np.int32,
        np.float32,
        np.int32,
        np.float32,
        np.float32,
    ]


def test_keep_is_a_prefix_with_the_exact_tail():
    record, exact = softmax_record(200, 16, 50)
    kept = np.random.default_rng(1).integers(1, 17, 200)
    cut = record.keep(kept)
    cuts(cut, kept)
    for i, n in enumerate(kept):
        np.testing.assert_array_equal(cut.ids[i, :n], record.ids[i, :n])
        np.testing.assert_array_equal(cut.logprobs[i, :n], record.logprobs[i, :n])
        tail = np.logaddexp.reduce(np.sort(exact[i])[: 50 - n])
        np.testing.assert_allclose(cut.tail_logprob[i], tail, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(cut.logsumexp, record.logsumexp)
    mass = np.exp(cut.logprobs.astype(np.float64)).sum(1) + np.exp(cut.tail_logprob)
    np.testing.assert_allclose(mass, 1, atol=1e-6)


def test_keep_twice_is_keep_once():
    record, _ = softmax_record(40, 8, 20)
    once = record.keep(3)
    for again in (once.keep(3), once.keep(8), record.keep(5).keep(3)):
        cuts(again, np.full(40, 3))
        np.testing.assert_array_equal(again.ids, once.ids)
        np.testing.assert_array_equal(again.logprobs, once.logprobs)
        np.testing.assert_allclose(again.tail_logprob, once.tail_logprob, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(once.keep(3).tail_logprob, once.tail_logprob)


def test_keep_takes_from_1_id_to_all_and_shrinks_the_width():
    record, _ = softmax_record(10, 8, 20)
    for asked, kept in ((-5, 1), (0, 1), (1, 1), (7, 7), (8, 8), (100, 8)):
        cuts(record.keep(asked), np.full(10, kept))
    ragged = record.keep(np.array([2, 5] * 5))
    cuts(ragged, np.array([2, 5] * 5))
    cuts(ragged.keep(3), np.array([2, 3] * 5))
    cuts(ragged.keep(100), np.array([2, 5] * 5))


def test_no_tail_until_something_is_cut():
    record, exact = softmax_record(10, 12, 12)
    assert np.isneginf(record.tail_logprob).all()
    assert np.isneginf(record.keep(12).tail_logprob).all()
    np.testing.assert_allclose(record.keep(11).tail_logprob, exact.min(1), rtol=0, atol=1e-6)


def test_a_row_of_one_token_has_no_positions():
    record, _ = softmax_record(3, 8, 20)
    empty = TopK(*(a[:0] for a in vars(record).values()))
    for cut in (empty.keep(3), empty.truncate(0.1, 0.9)):
        assert len(cut.ids) == len(cut.kept) == len(cut.tail_logprob) == 0


@pytest.mark.parametrize(
    ("min_prob", "top_p", "kept"),
    [
        (None, None, 5),
        (0.03, None, 4),
        (0.05, None, 3),
        (0.001, None, 5),
        (0.9, None, 1),  # none is that probable: the best stays
        (None, 0.45, 1),
        (None, 0.5, 1),  # reached exactly
        (None, 0.75, 2),
        (None, 0.55, 2),
        (None, 0.85, 3),
        (None, 0.999, 5),  # never reached
        (0.15, 0.999, 3),
        (0.001, 0.55, 2),
    ],
)
def test_truncate_cuts_at_the_floor_and_at_the_mass(min_prob, top_p, kept):
    record = planted(0.5, 0.25, 0.16, 0.04, 0.02)
    cut = record.truncate(min_prob, top_p)
    cuts(cut, [kept])
    rest = 1 - sum((0.5, 0.25, 0.16, 0.04, 0.02)[:kept])
    np.testing.assert_allclose(np.exp(cut.tail_logprob), rest, rtol=1e-5)


def test_truncate_is_per_position():
    flat, sharp = planted(0.25, 0.25, 0.25, 0.2), planted(0.9, 0.06, 0.02, 0.01)
    both = TopK(
        *(np.concatenate(p) for p in zip(vars(flat).values(), vars(sharp).values(), strict=True))
    )
    cuts(both.truncate(None, 0.7), [3, 1])
    cuts(both.truncate(0.05, None), [4, 2])
    cuts(both.truncate(0.05, 0.7), [3, 1])
    cuts(both.keep(np.array([2, 4])).truncate(0.015, None), [2, 3])
