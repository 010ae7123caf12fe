"""The fused LM head: distillation KL plus cross-entropy, a chunk of positions at a time.

Shapes: N positions, D width, V vocabulary, K stored ids. Logits [chunk, V] exist for one chunk
only; the gradients of hidden states and head are formed in the same pass, in float32.

Distillation: with p the teacher and q the student over the full vocabulary, S the stored ids,
P = p(S), M = q(S), and p_S, q_S the distributions inside S at temperature tau,

    KD = P log(P / M) + (1 - P) log((1 - P) / (1 - M)) + tau^2 P KL(p_S || q_S).

At tau = 1 this is, by the chain rule, exactly the forward KL on the K + 1 buckets (the stored ids
and the tail). At other tau only the stored ids are tempered, as nothing is known inside the tail.
Student masses come from logsumexp inside and outside S, never from 1 - sum, so a saturated student
keeps finite values and gradients. Total per position: alpha * KD + gamma * CE.

Sampled records are the same with P = 1 and the draws' shares as p_S: KD is the KL from the draws'
distribution, and its gradient at tau = 1 an unbiased estimate of that of KL(p || q) (Anshumann et
al., arXiv 2503.16870).

Source: S. Ren et al., arXiv 2608.13156, section 3 (loss); the gradient is derived in `_chunk`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Targets:
    """What N positions should predict; the records are None where only CE is trained.

    A position uses its first `kept` ids; beyond, `ids` repeats one of them.
    """

    labels: Tensor  # int64 [N]
    ids: Tensor | None = None  # int64 [N, K]
    logprobs: Tensor | None = None  # float32 [N, K], nats
    tail_logprob: Tensor | None = None  # float32 [N], nats; -inf: no tail
    kept: Tensor | None = None  # int64 [N], 1 to K

    def map(self, function: Callable[[Tensor], Tensor]) -> "Targets":
        """The same with `function` applied to each tensor there is."""
        fields = (self.labels, self.ids, self.logprobs, self.tail_logprob, self.kept)
        return Targets(*(None if field is None else function(field) for field in fields))

    def chunk(self, part: slice) -> "Targets":
        return self.map(lambda field: field[part])


@dataclass(frozen=True)
class LossWeights:
    """alpha * KD(tau) + gamma * CE."""

    alpha: float
    gamma: float
    tau: float


class DistillHead(nn.Module):
    """The LM head [V, D]; its forward is the loss, so ZeRO's gather hooks see the weight."""

    def __init__(self, d_model: int, vocab_size: int, chunk_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.chunk_positions = chunk_positions

    def forward(
        self, hidden: Tensor, targets: Targets, weights: LossWeights, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(scale * summed loss, KD [N], CE [N]); only the first carries a gradient.

        hidden: [N, D]. KD is zero where the targets have no records.
        """
        # Inside apply, autograd says that gradients are needed even where they are switched off.
        wants = torch.is_grad_enabled()
        return _FusedLoss.apply(
            hidden, self.weight, targets, weights, scale, self.chunk_positions, wants
        )


class _FusedLoss(torch.autograd.Function):
    """Value and gradient of `DistillHead.forward` in one pass over chunks."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        weights: LossWeights,
        scale: float,
        chunk_positions: int,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = (wants_grad and need for need in ctx.needs_input_grad[:2])
        kd = hidden.new_zeros(len(hidden), dtype=torch.float32)
        ce = torch.zeros_like(kd)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(hidden), chunk_positions):
            part = slice(start, start + chunk_positions)
            logits = (hidden[part] @ weight.T).float()
            needs = needs_hidden or needs_weight
            kd[part], ce[part], grad = _chunk(logits, targets.chunk(part), weights, needs)
            if grad is not None:
                grad = grad.mul_(scale)
                if needs_hidden:
                    grad_hidden[part] = grad.to(weight.dtype) @ weight
                if needs_weight:
                    grad_weight.addmm_(grad.T, hidden[part].float())
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(kd, ce)
        loss = scale * (weights.alpha * kd.sum() + weights.gamma * ce.sum())
        return loss, kd, ce

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_loss: Tensor, *_: Tensor) -> tuple:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunk(
    logits: Tensor, targets: Targets, weights: LossWeights, wants_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """KD [n], CE [n] and d(alpha KD + gamma CE)/d logits [n, V]; overwrites `logits`.

    With r_j = exp(z_j - logsumexp of the logits outside S), so r sums to 1 there, and t = 1 - M:
        j outside S:  gamma q_j + alpha (q_j - (1 - P) r_j), where q_j = t r_j
        j inside S:   gamma q_j + alpha (q_j - P q_j / M + tau P (q_S - p_S)_j)
    and the label's entry loses gamma. Every exponent is at most 0: nothing overflows.
    """
    alpha, gamma, tau = weights.alpha, weights.gamma, weights.tau
    lse = logits.logsumexp(1)
    labels = targets.labels[:, None]
    ce = lse - logits.gather(1, labels)[:, 0]
    if targets.ids is None or alpha == 0:
        grad = None
        if wants_grad:
            grad = logits.sub_(lse[:, None]).exp_().mul_(gamma)
            grad.scatter_add_(1, labels, torch.full_like(ce, -gamma)[:, None])
        return torch.zeros_like(ce), ce, grad

    padding = torch.arange(targets.ids.shape[1], device=logits.device) >= targets.kept[:, None]
    inside = logits.gather(1, targets.ids).masked_fill(padding, -torch.inf)  # [n, K]
    logits.scatter_(1, targets.ids, -torch.inf)
    lse_in, lse_out = inside.logsumexp(1), logits.logsumexp(1)
    log_m, log_t = lse_in - lse, lse_out - lse

    logprobs = targets.logprobs.masked_fill(padding, -torch.inf)
    log_p = logprobs.logsumexp(1)
    total = torch.logaddexp(log_p, targets.tail_logprob)  # stored rounded: not exactly 0
    log_p, log_tail = log_p - total, targets.tail_logprob - total
    p, tail = log_p.exp(), log_tail.exp()
    log_p_in = (logprobs / tau).log_softmax(1)
    log_q_in = (inside / tau).log_softmax(1)
    p_in = log_p_in.exp()
    kl_in = (p_in * (log_p_in - log_q_in)).masked_fill(padding, 0.0).sum(1)
    tail_term = torch.where(tail > 0, tail * (log_tail - log_t), 0.0)  # K = V: no tail
    kd = p * (log_p - log_m) + tail_term + tau**2 * p * kl_in
    if not wants_grad:
        return kd, ce, None

    lse_out = lse_out.masked_fill(lse_out == -torch.inf, 0.0)  # K = V: rows stay all -inf
    grad = logits.sub_(lse_out[:, None]).exp_()
    grad.mul_(((gamma + alpha) * log_t.exp() - alpha * tail)[:, None])
    q = (inside - lse[:, None]).exp()
    q_over_m = (inside - lse_in[:, None]).exp()
    tempered = (log_q_in.exp() - p_in) * (tau * p)[:, None]
    grad_in = (gamma + alpha) * q + alpha * (tempered - p[:, None] * q_over_m)
    grad.scatter_add_(1, targets.ids, grad_in)  # 0 there until now, and 0 from the padding
    grad.scatter_add_(1, labels, torch.full_like(ce, -gamma)[:, None])
    return kd, ce, grad
