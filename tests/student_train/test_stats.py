"""Statistics against closed forms, planted effects and a small simulation of coverage."""

import math

import numpy as np
import pytest

from student_train.stats import (
    append_jump,
    area_above,
    interaction,
    interaction_of_means,
    mean_ce,
    mean_over_seeds,
    paired_difference,
    ratio_estimate,
    t_975,
    trailing_mean,
)


def cells(rng, effect=0.0, documents=300):
    """Target counts and four cells of nats: hard documents are hard for all, `effect` is I."""
    tokens = rng.integers(5, 400, documents)
    hardness = rng.normal(2.7, 0.5, documents)
    noise = rng.normal(0, 0.02, (4, documents))
    return tokens, [
        tokens * (hardness + shift + e)
        for shift, e in zip((0.0, 0.01, 0.02, 0.03 + effect), noise, strict=True)
    ]


def test_the_published_means_give_the_published_interaction():
    assert interaction_of_means(2.7603, 2.7658, 2.7607, 2.7330) == pytest.approx(-0.0332, abs=1e-12)


def test_mean_is_weighted_by_tokens():
    assert mean_ce([1.0, 30.0], [1, 10]) == pytest.approx(31 / 11)


def test_ratio_estimate_by_hand():
    # R = 4/4 = 1, residuals -1, 1, 0: SE^2 = 3/2 * 2/16
    found = ratio_estimate([0.0, 2.0, 2.0], [1, 1, 2])
    assert found.value == 1.0
    assert found.standard_error == pytest.approx(math.sqrt(3 / 16))
    assert found.high - found.value == pytest.approx(4.30265 * math.sqrt(3 / 16))
    assert found.value - found.low == pytest.approx(4.30265 * math.sqrt(3 / 16))


def test_documents_without_targets_do_not_count():
    with_empty = ratio_estimate([0.0, 2.0, 2.0, 0.0], [1, 1, 2, 0])
    assert with_empty == ratio_estimate([0.0, 2.0, 2.0], [1, 1, 2])


def test_a_planted_difference_is_recovered_exactly_and_is_b_minus_a():
    tokens = np.array([3, 50, 700])
    nats = tokens * np.array([2.0, 9.0, 4.0])
    found = paired_difference(nats, nats + 0.25 * tokens, tokens)
    assert found.value == pytest.approx(0.25, abs=1e-12)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)
    assert found.excludes_zero


def test_pairing_removes_the_spread_between_documents():
    tokens, (a, b, _, _) = cells(np.random.default_rng(0))
    paired = paired_difference(a, b, tokens).standard_error
    alone = math.hypot(*(ratio_estimate(x, tokens).standard_error for x in (a, b)))
    assert paired < alone / 10


def test_interaction_agrees_with_the_means_and_is_symmetric():
    tokens, four = cells(np.random.default_rng(1), effect=-0.03)
    found = interaction(*four, tokens)
    means = [mean_ce(cell, tokens) for cell in four]
    assert found.value == pytest.approx(interaction_of_means(*means))
    pre_joint, pre_grow, post_joint, post_grow = four
    swapped = interaction(pre_grow, pre_joint, post_grow, post_joint, tokens)
    assert swapped.value == pytest.approx(-found.value)


def test_intervals_cover_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(1000):
        tokens, four = cells(rng, effect=-0.03, documents=80)
        found = interaction(*four, tokens)
        hits += found.low <= -0.03 <= found.high
    assert 925 <= hits <= 972  # 95 % +- 3.5 standard errors


def test_intervals_count_documents_not_tokens():
    tokens, (a, b, _, _) = cells(np.random.default_rng(3))
    one = paired_difference(a, b, tokens)
    longer = paired_difference(7 * a, 7 * b, 7 * tokens)
    assert longer.standard_error == pytest.approx(one.standard_error)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (9, 2.26216), (10, 2.22814), (30, 2.04227), (120, 1.97993)],
)
def test_t_points_of_the_published_tables(freedom, expected):
    assert t_975(freedom) == pytest.approx(expected, abs=2e-4)


def test_mean_over_seeds_by_hand():
    found = mean_over_seeds([1.0, 2.0, 3.0])
    assert (found.value, found.standard_error) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert found.low == pytest.approx(2 - 4.30265 / math.sqrt(3))
    with pytest.raises(ValueError, match="found 1 seed"):
        mean_over_seeds([1.0])


def test_transition_metrics():
    assert append_jump(2.75, 3.0) == 0.25
    assert area_above([3.5, 3.0, 2.0], 2.5) == pytest.approx(1.0 / 3)  # 1.0 + 0.5 - 0.5
    with pytest.raises(ValueError, match="no losses"):
        area_above([], 2.5)


def test_trailing_mean():
    assert trailing_mean([1, 3, 5, 7], 2).tolist() == [1, 2, 4, 6]
    assert trailing_mean([1, 3], 9).tolist() == [1, 2]
    assert trailing_mean([], 3).shape == (0,)
    with pytest.raises(ValueError, match="window of 0"):
        trailing_mean([1.0], 0)


def test_impossible_inputs_are_refused():
    with pytest.raises(ValueError, match="shapes"):
        paired_difference([1.0, 2.0], [1.0], [1, 1])
    with pytest.raises(ValueError, match="no targets"):
        mean_ce([0.0], [0])
    with pytest.raises(ValueError, match="found 1 document"):
        ratio_estimate([1.0], [4])
