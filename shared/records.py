"""Records: what the cache says about each token position.

A row of T tokens has T - 1 records; record i is the teacher's distribution over token i + 1, given
tokens 0..i. So a record and its label share an index and there is nothing to shift.

- `topk`: the most probable ids with their natural-log probabilities, the log of the probability
  outside them (the tail, computed, not 1 - sum), and the logsumexp of the raw logits, so that raw
  logits are `logprobs + logsumexp`. A position may keep fewer ids than another.
- `sample`: draws from the teacher with replacement, as distinct ids and how often each was drawn:
  an unbiased estimate of the whole distribution (Anshumann et al., arXiv 2503.16870).
- `tokens`: token ids alone, for training without a teacher.

Records are rectangles: a position with fewer ids than the widest of its row is padded with an id it
does hold, of probability zero. `kept` (or a count of 0) says where the padding starts.
"""

from dataclasses import dataclass

import numpy as np

KINDS = ("topk", "sample", "tokens")


@dataclass(frozen=True)
class TopK:
    """Top-k records of one row, best id first; log-probabilities in nats."""

    ids: np.ndarray  # int32 [positions, k]
    logprobs: np.ndarray  # float32 [positions, k]; -inf in the padding
    kept: np.ndarray  # int32 [positions], ids of each position, 1 to k
    tail_logprob: np.ndarray  # float32 [positions]; -inf if the ids are the whole vocabulary
    logsumexp: np.ndarray  # float32 [positions]

    def keep(self, kept: np.ndarray | int) -> "TopK":
        """The first `kept` ids of each position, at least 1; the others join the tail, exactly."""
        kept = np.clip(kept, 1, self.kept).astype(np.int32)
        dropped = np.arange(self.ids.shape[1]) >= kept[:, None]
        with np.errstate(divide="ignore"):  # log 0: nothing is dropped
            rest = np.log(np.where(dropped, np.exp(self.logprobs), 0).sum(1, dtype=np.float64))
        width = int(kept.max(initial=1))
        return TopK(
            np.where(dropped, self.ids[:, :1], self.ids)[:, :width],
            np.where(dropped, np.float32(-np.inf), self.logprobs)[:, :width],
            kept,
            np.logaddexp(self.tail_logprob, rest).astype(np.float32),
            self.logsumexp,
        )

    def truncate(self, min_prob: float | None, top_p: float | None) -> "TopK":
        """Keep ids of probability >= `min_prob`, and no more than first reach the mass `top_p`."""
        kept = self.kept
        if min_prob is not None:
            kept = np.minimum(kept, (self.logprobs >= np.log(min_prob)).sum(1))
        if top_p is not None:
            before = np.exp(self.logprobs).cumsum(1, dtype=np.float64)[:, :-1] < top_p
            kept = np.minimum(kept, 1 + before.sum(1))
        return self.keep(kept)


@dataclass(frozen=True)
class Sample:
    """Draws of one row: distinct ids and their counts, which sum to N at every position."""

    ids: np.ndarray  # int32 [positions, m]
    counts: np.ndarray  # int32 [positions, m]; 0 in the padding


@dataclass(frozen=True)
class Row:
    """One document: its global row number within its split, tokens and records."""

    number: int
    tokens: np.ndarray  # int32 [T]
    record: TopK | Sample | None
