"""From token rows to records: one forward pass, then the head a chunk of positions at a time."""

from collections.abc import Iterator

import click
import numpy as np
import torch

from shared.records import Sample, TopK
from teacher_dump.teacher import Teacher, head_logits

DRAW_POSITIONS = 128  # positions whose float64 distribution functions exist at once


@torch.inference_mode()
def topk_records(
    teacher: Teacher, rows: list[np.ndarray], k: int, head_positions: int
) -> list[TopK]:
    """Top-k records of token rows (int32 [T]), one padded batch; a row has T - 1 records.

    `head_positions` bounds how many full-vocabulary logit vectors exist at once.
    Raises ClickException if the teacher's logits are not finite.
    """
    parts = []
    for _, logits in _logit_chunks(teacher, rows, head_positions):
        top, ids = logits.topk(k, dim=-1)
        lse = logits.logsumexp(dim=-1)
        # The tail from the other logits themselves: 1 - sum(top) would be rounding noise.
        tail = logits.scatter_(-1, ids, -torch.inf).logsumexp(dim=-1) - lse
        kept = torch.full_like(lse, k, dtype=torch.int32)
        parts.append(_numpy(ids.int(), top - lse[:, None], kept, tail, lse))
    return [TopK(*columns) for columns in _per_row(parts, rows)]


@torch.inference_mode()
def sample_records(
    teacher: Teacher, rows: list[np.ndarray], uniforms: list[np.ndarray], head_positions: int
) -> list[Sample]:
    """Draws from the teacher for token rows (int32 [T]), by inverting its distribution function.

    `uniforms`: float64 [T-1, N] in [0, 1) per row, see `row_uniforms`: N draws for each position.
    Raises ClickException if the teacher's logits are not finite.
    """
    every = torch.from_numpy(np.concatenate(uniforms)).to(teacher.device)
    parts = []
    for part, logits in _logit_chunks(teacher, rows, head_positions):
        pieces = zip(logits.split(DRAW_POSITIONS), every[part].split(DRAW_POSITIONS), strict=True)
        parts += [_numpy(*_draw(piece, u)) for piece, u in pieces]
    return [
        Sample(ids[:, :width], counts[:, :width])
        for ids, counts in _per_row(parts, rows)
        for width in [int((counts > 0).sum(1).max(initial=1))]
    ]


def row_uniforms(seed: int, split: str, number: int, positions: int, draws: int) -> np.ndarray:
    """The uniforms float64 [positions, draws] of one row, from its number alone.

    So a row's draws do not depend on its batch, its shard or the worker that makes it.
    """
    key = [seed, 2 * number + (split == "validation")]
    return np.random.Generator(np.random.Philox(key=key)).random((positions, draws))


@torch.inference_mode()
def divergence(
    teacher: Teacher, rows: list[np.ndarray], records: list[TopK], head_positions: int
) -> np.ndarray:
    """KL in nats, float64 [positions of all rows], of stored records from the teacher as it is now.

    Over the stored ids and the tail, both sides normalised.
    """
    parts = []
    width = max(record.ids.shape[1] for record in records)
    ids, stored = (
        np.concatenate([_widen(getattr(record, name), width) for record in records])
        for name in ("ids", "logprobs")
    )
    kept = np.concatenate([record.kept for record in records])
    tail = np.concatenate([record.tail_logprob for record in records])
    padding = np.arange(width) >= kept[:, None]
    stored[padding] = -np.inf
    for part, logits in _logit_chunks(teacher, rows, head_positions):
        index = torch.from_numpy(ids[part].astype(np.int64)).to(teacher.device)
        inside = logits.gather(-1, index).masked_fill(
            torch.from_numpy(padding[part]).to(teacher.device), -torch.inf
        )
        outside = logits.scatter_(-1, index, -torch.inf).logsumexp(-1, keepdim=True)
        now = torch.cat([inside, outside], dim=-1).double().log_softmax(-1).cpu().numpy()
        then = np.concatenate([stored[part], tail[part, None]], axis=1).astype(np.float64)
        then -= np.logaddexp.reduce(then, axis=1)[:, None]
        with np.errstate(invalid="ignore"):  # -inf - -inf where there is no probability
            parts.append(np.where(np.isfinite(now), np.exp(now) * (now - then), 0).sum(1))
    return np.concatenate(parts)


def _widen(array: np.ndarray, width: int) -> np.ndarray:
    """Repeat the last column up to `width` columns."""
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), mode="edge")


def _logit_chunks(
    teacher: Teacher, rows: list[np.ndarray], head_positions: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(which positions, float32 logits [n, token ids]) of all rows' positions, one after another.

    The last token of a row has no target, so no position.
    """
    width = max(len(row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    scored = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)], scored[i, : max(0, len(row) - 1)] = row, 1, True
    ids, mask, scored = (torch.from_numpy(a).to(teacher.device) for a in (ids, mask, scored))
    hidden = teacher.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[
        scored
    ]
    for start in range(0, max(1, len(hidden)), head_positions):
        part = slice(start, start + head_positions)
        logits = head_logits(teacher, hidden[part])
        if not logits.amax(-1).isfinite().all():
            raise click.ClickException(  # one rank alone may meet it
                "the teacher's logits are not finite (overflow or broken weights): "
                "try --dtype float32"
            )
        yield part, logits


def _draw(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, counts) int32 [n, N], distinct ids first, of N draws by uniforms [n, N]."""
    cdf = logits.double()
    cdf = cdf.sub_(cdf.amax(-1, keepdim=True)).exp_().cumsum_(-1)
    drawn = torch.searchsorted(cdf, (uniforms * cdf[:, -1:]).sort(-1).values, right=True)
    drawn.clamp_(max=logits.shape[-1] - 1)
    slot = torch.zeros_like(drawn)
    slot[:, 1:] = (drawn[:, 1:] != drawn[:, :-1]).cumsum(-1)
    counts = torch.zeros_like(drawn).scatter_add_(-1, slot, torch.ones_like(drawn))
    ids = torch.zeros_like(drawn).scatter_(-1, slot, drawn)
    ids = torch.where(counts > 0, ids, ids[:, :1])
    return ids.int(), counts.int()


def _numpy(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    return tuple(tensor.cpu().numpy() for tensor in tensors)


def _per_row(
    parts: list[tuple[np.ndarray, ...]], rows: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, ...]]:
    """Join the columns of consecutive chunks and cut them at the rows."""
    edges = np.cumsum([max(0, len(row) - 1) for row in rows])[:-1]
    columns = [np.split(np.concatenate(pieces), edges) for pieces in zip(*parts, strict=True)]
    return zip(*columns, strict=True)
