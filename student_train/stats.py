"""Numbers of the comparison: paired differences, their interaction, and transitions at appends.

Plain arrays in, numbers out, no files and no torch, so each answer can be checked by hand. The unit
of every interval is the document: losses of tokens of one document depend on each other, so to
count tokens as independent would make the intervals far too short.

Sources: the four arms, D, I and the transition metrics are from S. Ren et al., arXiv 2608.13156.
The standard errors are those of the ratio estimator with documents as clusters: W. G. Cochran,
Sampling Techniques (1977), ch. 6; E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Z_975 = 1.959963984540054
# Student's t, 97.5 % point, 1 to 9 degrees of freedom: too few for the series in `t_975`.
T_975 = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and 95 % interval, all in the unit of the value."""

    value: float
    standard_error: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.low > 0 or self.high < 0


def t_975(freedom: int) -> float:
    """97.5 % point of Student's t with `freedom` >= 1 degrees of freedom, to four digits.

    A table up to 9, then the expansion around the normal point z (Abramowitz and Stegun 26.7.5),
    so that no library of distributions is needed. Raises ValueError below 1.
    """
    if freedom < 1:
        raise ValueError(f"found {freedom} degrees of freedom, expected 1 or more")
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = Z_975
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def mean_ce(nats: ArrayLike, tokens: ArrayLike) -> float:
    """Token-weighted mean, nats per token: sum_i nats_i / sum_i tokens_i.

    `nats` [documents] are sums over each document's targets, `tokens` [documents] their counts.
    Raises ValueError if the shapes differ or there are no targets.
    """
    nats, tokens = _documents(nats, tokens)
    return float(nats.sum() / tokens.sum())


def ratio_estimate(nats: ArrayLike, tokens: ArrayLike) -> Estimate:
    """R = sum_i d_i / sum_i m_i with its linearised standard error over documents.

    With d = `nats` [documents], m = `tokens` [documents] and n documents that have targets:

        SE^2 = n / (n - 1) * sum_i (d_i - R m_i)^2 / (sum_i m_i)^2

    and the interval R +- t(n - 1) SE. Unit: nats per token. Raises ValueError below two documents.
    """
    nats, tokens = _documents(nats, tokens)
    count = int(np.count_nonzero(tokens))
    if count < 2:
        raise ValueError(f"found {count} document(s) with targets, expected 2 or more")
    value = nats.sum() / tokens.sum()
    residual = nats - value * tokens
    variance = count / (count - 1) * np.square(residual).sum() / tokens.sum() ** 2
    return _interval(float(value), math.sqrt(variance), count - 1)


def paired_difference(nats_a: ArrayLike, nats_b: ArrayLike, tokens: ArrayLike) -> Estimate:
    """CE(b) - CE(a) on the same documents: `ratio_estimate` of d = nats_b - nats_a.

    All three are [documents], sums of nats and target counts. What makes a document hard for both
    cancels, which is why the pairs are taken before the standard error. Raises ValueError.
    """
    nats_a, _ = _documents(nats_a, tokens)
    nats_b, tokens = _documents(nats_b, tokens)
    return ratio_estimate(nats_b - nats_a, tokens)


def interaction(
    pre_joint: ArrayLike,
    pre_grow: ArrayLike,
    post_joint: ArrayLike,
    post_grow: ArrayLike,
    tokens: ArrayLike,
) -> Estimate:
    """I = D_grow - D_joint with D = CE(post) - CE(pre), paired over the documents of four cells.

    Each is [documents]: sums of nats of the cell, and target counts. Below zero: post-norm gains
    more from growth than pre-norm does. Unit: nats per token. Raises ValueError.
    """
    joint, _ = _documents(np.subtract(post_joint, pre_joint), tokens)
    grow, _ = _documents(np.subtract(post_grow, pre_grow), tokens)
    return ratio_estimate(grow - joint, tokens)


def interaction_of_means(
    pre_joint: float, pre_grow: float, post_joint: float, post_grow: float
) -> float:
    """I = (post_grow - pre_grow) - (post_joint - pre_joint), of means in nats per token.

    The published means 2.7603, 2.7658, 2.7607, 2.7330 give I = -0.0332 (arXiv 2608.13156).
    """
    return (post_grow - pre_grow) - (post_joint - pre_joint)


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of one value per seed, SE = SD / sqrt(n), and the t interval over seeds.

    The interval that `ratio_estimate` gives holds for the trained models at hand; this one asks
    what other seeds would give. Raises ValueError below two seeds.
    """
    if len(values) < 2:
        raise ValueError(f"found {len(values)} seed(s), expected 2 or more")
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return _interval(float(np.mean(values)), error, len(values) - 1)


def append_jump(ce_end_previous_phase: float, ce_start_next: float) -> float:
    """CE at step 0 of phase p + 1 minus CE at the end of phase p, nats per token."""
    return ce_start_next - ce_end_previous_phase


def area_above(losses: ArrayLike, level: float) -> float:
    """A = 1/n sum_i (losses_i - level): mean excess over the pre-append loss, nats per token.

    `losses` [n] are those of the first n steps after an append; A * n is the area in nats per
    token x steps. The excess keeps its sign: cutting it at zero would make noise look like a
    transition. Raises ValueError for no losses.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.size == 0:
        raise ValueError("found no losses after the append, expected one or more")
    return float((losses - level).mean())


def trailing_mean(values: ArrayLike, window: int) -> np.ndarray:
    """Mean of the last `window` values up to and with each one: float64, same shape [n].

    The first ones average what there is. Raises ValueError for a window below 1.
    """
    if window < 1:
        raise ValueError(f"found a window of {window}, expected 1 or more")
    values = np.asarray(values, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (sums[end] - sums[start]) / (end - start)


def _documents(nats: ArrayLike, tokens: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    nats = np.asarray(nats, dtype=np.float64)
    tokens = np.asarray(tokens, dtype=np.float64)
    if nats.ndim != 1 or nats.shape != tokens.shape:
        raise ValueError(f"found shapes {nats.shape} and {tokens.shape}, expected one [documents]")
    if not tokens.sum() > 0:
        raise ValueError("found no targets, expected a document with one or more")
    return nats, tokens


def _interval(value: float, error: float, freedom: int) -> Estimate:
    half = t_975(freedom) * error
    return Estimate(value, error, value - half, value + half)
