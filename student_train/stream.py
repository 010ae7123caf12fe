"""From the cache to batches: which rows each step trains on, and their tensors.

The order is a pure function of (seed, step): rank and world size only slice a step's rows, so
resuming needs the step number alone. An epoch visits every row once. Blocks of 64 consecutive rows
are permuted, then rows are shuffled inside windows of 16 blocks: nearly a full shuffle, while a
reader decodes each Parquet row group once per epoch.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.cache import GROUP_ROWS, CacheReader
from shared.records import Row
from student_train.loss import Targets
from student_train.model import Layout

WINDOW_BLOCKS = 16


@dataclass(frozen=True)
class Batch:
    """One rank's rows as tensors: M real tokens, N of which have a target."""

    tokens: Tensor  # int64 [M], row after row
    layout: Layout
    positions: Tensor  # int64 [N], which of the M have a target
    targets: Targets

    def to(self, device: torch.device) -> "Batch":
        t = self.targets
        fields = (t.labels, t.ids, t.logprobs, t.tail_logprob)
        moved = (None if f is None else f.to(device, non_blocking=True) for f in fields)
        layout = Layout(self.layout.rows, self.layout.time, self.layout.index.to(device))
        return Batch(self.tokens.to(device), layout, self.positions.to(device), Targets(*moved))


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Row numbers int64 [rows] in the order in which this epoch visits them."""
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    blocks = rng.permutation(-(-rows // GROUP_ROWS))
    order = (blocks[:, None] * GROUP_ROWS + np.arange(GROUP_ROWS)).ravel()
    order = order[order < rows]
    for start in range(0, rows, WINDOW_BLOCKS * GROUP_ROWS):
        rng.shuffle(order[start : start + WINDOW_BLOCKS * GROUP_ROWS])
    return order


def step_rows(order_of: "EpochOrders", step: int, batch_rows: int) -> np.ndarray:
    """Row numbers of one step (counted from 0 over the whole run, across phases)."""
    first = step * batch_rows
    return np.array([order_of[position] for position in range(first, first + batch_rows)])


class EpochOrders:
    """The endless sequence of row numbers; keeps the permutation of the epoch in use."""

    def __init__(self, seed: int, rows: int) -> None:
        self.seed, self.rows = seed, rows
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.seed, epoch, self.rows)
        return int(self._order[offset])


def collate(rows: list[Row]) -> Batch:
    """Rows end to end; each token but a row's last has the next as its target, and a record."""
    lengths = np.array([len(row.tokens) for row in rows])
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    row_of = np.repeat(np.arange(len(rows)), lengths)
    time = int(lengths.max())
    layout = Layout(len(rows), time, torch.from_numpy(row_of * time + within))
    positions = np.flatnonzero(within < lengths[row_of] - 1)
    labels = tokens[positions + 1]
    records = [row.record for row in rows]
    if records[0] is None:
        targets = Targets(torch.from_numpy(labels))
    else:
        targets = Targets(
            torch.from_numpy(labels),
            torch.from_numpy(np.concatenate([r.ids for r in records]).astype(np.int64)),
            torch.from_numpy(np.concatenate([r.logprobs for r in records])),
            torch.from_numpy(np.concatenate([r.tail_logprob for r in records])),
        )
    return Batch(torch.from_numpy(tokens), layout, torch.from_numpy(positions), targets)


def training_batches(
    cache: CacheReader,
    seed: int,
    steps: range,
    batch_rows: int,
    micro_rows: int,
    rank: int,
    world: int,
) -> Iterator[tuple[list[Batch], int]]:
    """For each step: this rank's micro-batches, and the targets of all ranks together.

    A thread decodes the next step while this one trains; its error is raised here.
    """
    order = EpochOrders(seed, len(cache))

    def load(step: int) -> tuple[list[Batch], int]:
        numbers = step_rows(order, step, batch_rows)
        mine = [cache.row(number) for number in numbers[rank::world]]
        micro = [collate(mine[i : i + micro_rows]) for i in range(0, len(mine), micro_rows)]
        return micro, int((cache.lengths[numbers] - 1).sum())

    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(load, steps.start) if steps else None
        for step in steps:
            current = ahead.result()
            if step + 1 < steps.stop:
                ahead = pool.submit(load, step + 1)
            yield current
