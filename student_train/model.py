"""The student: a stack of Qwen3-style layers whose norm placement is a parameter.

Departures from a stock Qwen3 model: the sublayer equation comes from `placement.PLACEMENTS`; a
post-norm stack has an entry norm and no final norm; the LM head computes the loss (loss.py).
Module names are those of transformers' Qwen3ForCausalLM, so a pre-norm student is one as it stands.

Only active blocks exist: a grown student in phase p *is* the (p + 1)-block model. Weights are drawn
per tensor from a generator seeded by the run's seed and the tensor's name, so every placement,
curriculum and depth starts from the same tensors.

Documents of unequal length share a batch, so nearly half of a padded batch can be padding. The
stream therefore holds real tokens only, [M, d_model]; rows are padded for attention alone.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from student_train.config import ModelConfig
from student_train.loss import DistillHead, LossWeights, Targets
from student_train.placement import PLACEMENTS


@dataclass(frozen=True)
class Layout:
    """Where the M real tokens of a batch stand in its padded form [rows, time]."""

    rows: int
    time: int
    index: Tensor  # int64 [M], into the flattened [rows * time]

    def pad(self, x: Tensor) -> Tensor:
        """[M, ...] -> [rows, time, ...], zeros on the right."""
        padded = x.new_zeros(self.rows * self.time, *x.shape[1:])
        return padded.index_copy(0, self.index, x).unflatten(0, (self.rows, self.time))

    def unpad(self, x: Tensor) -> Tensor:
        """[rows, time, ...] -> [M, ...]."""
        return x.flatten(0, 1)[self.index]


class RMSNorm(nn.Module):
    """x / rms(x) * gain over the last axis, in float32. Source: arXiv 1910.07467."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with RMSNorm on queries and keys, and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, width = config.d_model, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, width
        self.q_proj = nn.Linear(d, config.heads * width, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.heads * width, d, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, layout: Layout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[M, d_model] -> the same. Rows are padded on the right, so causal is enough."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = (layout.pad(y).transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.o_proj(layout.unpad(mixed.transpose(1, 2)).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: arXiv 2002.05202."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward sublayers, each with the one norm its placement puts somewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = PLACEMENTS[config.norm].sublayer
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)

    def forward(self, x: Tensor, layout: Layout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = self.sublayer(x, lambda y: self.self_attn(y, layout, rotary), self.input_layernorm)
        return self.sublayer(x, self.mlp, self.post_attention_layernorm)


class Stack(nn.Module):
    """Embedding, entry norm or not, layers, final norm or not."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        extra = RMSNorm(config.d_model, config.rms_norm_eps)
        self.entry_norm = extra if PLACEMENTS[config.norm].extra_norm == "entry" else None
        self.norm = extra if PLACEMENTS[config.norm].extra_norm == "final" else None

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        """tokens int64 [M] -> hidden states [M, d_model] for the head."""
        x = self.embed_tokens(tokens)
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        rotary = rotary_table(layout.index % layout.time, self.config, x.dtype)
        for layer in self.layers:
            x = layer(x, layout, rotary)
        return x if self.norm is None else self.norm(x)


class Student(nn.Module):
    """A stack and its loss-computing head."""

    def __init__(self, config: ModelConfig, head_positions: int = 256) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = DistillHead(config.d_model, config.vocab_size, head_positions)

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        positions: Tensor,
        targets: Targets,
        weights: LossWeights,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of the N positions that have a target, as `DistillHead.forward`.

        tokens: int64 [M], the real tokens of all rows. positions: int64 [N], which of them have a
        target (all but the last of each row).
        """
        hidden = self.model(tokens, layout)[positions]
        return self.lm_head(hidden, targets, weights, scale)


def rotary_table(
    position: Tensor, config: ModelConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos, sin [M, 1, head_dim] for positions [M] within their rows. Source: arXiv 2104.09864."""
    steps = torch.arange(0, config.head_dim, 2, device=position.device, dtype=torch.float32)
    frequencies = config.rope_theta ** (-steps / config.head_dim)
    angles = torch.outer(position.float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (j, j + head_dim/2) of x [M, heads, head_dim] by position."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def width_rule_std(d_model: int) -> float:
    """Std 0.02 at the paper's width 4096, scaled so that a new block perturbs alike when narrow."""
    return 0.02 * (4096 / d_model) ** 0.5


@torch.no_grad()
def initialise(student: Student, seed: int, std: float) -> None:
    """Draw every matrix from N(0, std), each from its own generator keyed by (seed, name)."""
    for name, parameter in student.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # norm gains
            continue
        key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
