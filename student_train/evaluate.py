"""Losses per document on the validation rows: full head, fixed rows and order, float64 sums."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from shared.cache import CacheReader
from shared.files import replacing
from student_train.loss import LossWeights
from student_train.model import Student
from student_train.stream import collate


@dataclass(frozen=True)
class DocumentLosses:
    """Sums over each document's targets, in document order."""

    tokens: np.ndarray  # int64 [documents], targets
    ce_nats: np.ndarray  # float64 [documents]
    kd_nats: np.ndarray  # float64 [documents]

    @property
    def ce(self) -> float:
        """Cross-entropy, nats per token."""
        return float(self.ce_nats.sum() / self.tokens.sum())

    @property
    def kd(self) -> float:
        """Distillation KL, nats per token."""
        return float(self.kd_nats.sum() / self.tokens.sum())


@torch.no_grad()
def evaluate(
    student: Student, cache: CacheReader, batch_rows: int, tau: float, device: torch.device
) -> DocumentLosses:
    """CE and KD of every row of `cache`; all ranks call it and get the whole answer.

    Every rank makes the same number of forward passes (ZeRO-3 gathers weights in them), the last
    ones on a stand-in row where the rows run out.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sums = torch.zeros(2, len(cache), dtype=torch.float64, device=device)
    weights = LossWeights(alpha=1.0, gamma=1.0, tau=tau)
    for start in range(rank * batch_rows, rank * batch_rows + len(cache), world * batch_rows):
        numbers = range(start, min(start + batch_rows, len(cache))) or range(1)
        rows = [cache.row(number) for number in numbers]
        batch = collate(rows).to(device)
        _, kd, ce = student(
            batch.tokens, batch.layout, batch.positions, batch.targets, weights, 1.0
        )
        if start >= len(cache):
            continue
        document = np.repeat(numbers, [len(row.tokens) - 1 for row in rows])
        index = torch.from_numpy(document.astype(np.int64)).to(device)
        sums[0].index_add_(0, index, ce.double())
        sums[1].index_add_(0, index, kd.double())
    dist.all_reduce(sums)
    ce_nats, kd_nats = sums.cpu().numpy()
    return DocumentLosses((cache.lengths - 1).astype(np.int64), ce_nats, kd_nats)


def write_losses(path: Path, losses: DocumentLosses, phase: int, step: int) -> None:
    """Parquet: phase, step (within the phase), document, tokens, ce_nats, kd_nats (sums)."""
    rows = len(losses.tokens)
    table = pa.table(
        {
            "phase": pa.array([phase] * rows, pa.int32()),
            "step": pa.array([step] * rows, pa.int64()),
            "document": pa.array(range(rows), pa.int64()),
            "tokens": pa.array(losses.tokens, pa.int64()),
            "ce_nats": pa.array(losses.ce_nats, pa.float64()),
            "kd_nats": pa.array(losses.kd_nats, pa.float64()),
        }
    )
    with replacing(path) as temporary:
        pq.write_table(table, temporary)
