"""From the cache to batches: which rows each step trains on, and their tensors.

The order is a pure function of (seed, step): rank and world size only slice a step's rows, so
resuming needs the step number alone. An epoch visits every row once. Blocks of 64 consecutive rows
are permuted, then rows are shuffled inside windows of 16 blocks: nearly a full shuffle, while a
reader fetches each Parquet row group, which a block is, once per epoch.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.cache import CacheReader
from shared.records import Row, Sample, TopK
from shared.shardfile import GROUP_ROWS
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
        layout = Layout(self.layout.rows, self.layout.time, self.layout.index.to(device))
        targets = self.targets.map(lambda field: field.to(device, non_blocking=True))
        return Batch(self.tokens.to(device), layout, self.positions.to(device), targets)


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Row numbers int64 [rows] in the order in which this epoch visits them."""
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    blocks = rng.permutation(-(-rows // GROUP_ROWS))
    windows = []
    for start in range(0, len(blocks), WINDOW_BLOCKS):
        chosen = blocks[start : start + WINDOW_BLOCKS]
        window = (chosen[:, None] * GROUP_ROWS + np.arange(GROUP_ROWS)).ravel()
        window = window[window < rows]
        rng.shuffle(window)
        windows.append(window)
    return np.concatenate(windows)


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
    targets = _targets(tokens[positions + 1], [row.record for row in rows])
    return Batch(torch.from_numpy(tokens), layout, torch.from_numpy(positions), targets)


def _targets(labels: np.ndarray, records: list[TopK | Sample | None]) -> Targets:
    """Labels int64 [N] and the records of the same positions, padded to the widest row."""
    if records[0] is None:
        return Targets(torch.from_numpy(labels))
    columns = [_columns(record) for record in records]
    width = max(ids.shape[1] for ids, *_ in columns)
    wide = [
        (_widen(ids, width, ids[:, -1:]), _widen(logprobs, width, -np.inf), tail, kept)
        for ids, logprobs, tail, kept in columns
    ]
    ids, logprobs, tail, kept = (np.concatenate(parts) for parts in zip(*wide, strict=True))
    arrays = (labels, ids.astype(np.int64), logprobs, tail, kept.astype(np.int64))
    return Targets(*map(torch.from_numpy, arrays))


def _columns(record: TopK | Sample) -> tuple[np.ndarray, ...]:
    """ids, logprobs, tail_logprob and kept; draws as the log of their shares, without a tail."""
    if isinstance(record, TopK):
        return record.ids, record.logprobs, record.tail_logprob, record.kept
    with np.errstate(divide="ignore"):  # log 0 in the padding
        shares = np.log(record.counts / record.counts.sum(1, keepdims=True)).astype(np.float32)
    no_tail = np.full(len(shares), -np.inf, np.float32)
    return record.ids, shares, no_tail, (record.counts > 0).sum(1)


def _widen(array: np.ndarray, width: int, fill: np.ndarray | float) -> np.ndarray:
    """[n, m] with columns of `fill` added up to `width`."""
    wide = np.empty((len(array), width), array.dtype)
    wide[:, : array.shape[1]] = array
    wide[:, array.shape[1] :] = fill
    return wide


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
