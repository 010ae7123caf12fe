"""Held-out cost of an interpolated bigram model: the bar that a language model has to clear.

Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1999).
"""

from collections.abc import Sequence

import numpy as np

Rows = Sequence[Sequence[int]]


def bigram_nats(train_rows: Rows, heldout_rows: Rows, vocab: int) -> float:
    """Mean nats per target token (every position but a row's first) of a Kneser-Ney bigram.

    Modified Kneser-Ney: counts of 1, 2 and 3 or more are discounted by amounts estimated from
    the counts of counts, and the mass set free goes to the continuation unigram, which is
    smoothed with the uniform distribution by adding one to every type count.
    """
    pairs, counts = np.unique(_pairs(train_rows, vocab), return_counts=True)
    previous, following = np.divmod(pairs, vocab)

    seen = np.maximum(np.bincount(np.minimum(counts, 5), minlength=5), 1.0)  # counts of counts
    ratio = seen[1] / (seen[1] + 2 * seen[2])
    discount = np.array([0.0] + [n - (n + 1) * ratio * seen[n + 1] / seen[n] for n in (1, 2, 3)])
    discounts = discount[np.minimum(counts, 3)]

    types = np.bincount(following, minlength=vocab) + 1.0  # contexts each token was seen after
    unigram = types / types.sum()
    total = np.bincount(previous, weights=counts, minlength=vocab)
    freed = np.bincount(previous, weights=discounts, minlength=vocab)
    backoff = np.divide(freed, total, out=np.ones(vocab), where=total > 0)

    targets = _pairs(heldout_rows, vocab)
    before, after = np.divmod(targets, vocab)
    place = np.minimum(np.searchsorted(pairs, targets), len(pairs) - 1)
    kept = np.where(pairs[place] == targets, counts[place] - discounts[place], 0.0)
    probability = kept / np.maximum(total[before], 1.0) + backoff[before] * unigram[after]
    return float(-np.log(probability).mean())


def _pairs(rows: Rows, vocab: int) -> np.ndarray:
    """Each row's adjacent token pairs, as one array of ``previous * vocab + following``."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    return np.concatenate([row[:-1] * vocab + row[1:] for row in arrays])
