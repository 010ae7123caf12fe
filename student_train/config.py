"""Settings of one run, and the shape of its model.

`RunConfig` is what the command line and the presets set. `ModelConfig` is what the model is built
from: the run's settings, with sizes taken from the teacher in the cache where they are not given.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shared.config import setting
from shared.errors import UsageError

# They decide how much is computed at once and what is looked at when, not what is learnt: a run
# may go on with other values.
FREE_SETTINGS = ("micro_rows", "head_positions", "validate_every", "checkpoint_every")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run (an arm): placement x curriculum x seed, with every number that shapes it."""

    norm: Literal["pre", "post"] = setting("Norm placement.")
    curriculum: Literal["grow", "joint"] = setting(
        "Append a block per phase, or have all from the start."
    )
    blocks: int = setting("Blocks of the full student (K).")
    layers_per_block: int = setting("Layers per block (L).")
    d_model: int | None = setting("Stream width; default the teacher's.")
    heads: int | None = setting("Attention heads; default the teacher's.")
    kv_heads: int | None = setting("Key-value heads; default the teacher's.")
    head_dim: int | None = setting("Width of a head; default the teacher's.")
    d_ff: int | None = setting("Feed-forward width; default the teacher's.")
    embedding: Literal["teacher", "random"] = setting(
        "Embedding, head and extra norm: the teacher's (embedding frozen), or random and trained."
    )
    init_std: float | None = setting("Std of new weights; default 0.02*sqrt(4096/d_model).")
    steps_per_phase: int = setting("Optimiser steps per phase.")
    batch_rows: int = setting("Rows per step, all ranks together.")
    micro_rows: int | None = setting("Rows per rank and forward pass; default batch-rows/ranks.")
    lr: float = setting("Peak learning rate.")
    lr_min: float = setting("Learning rate at the end of a phase.")
    warmup_steps: int = setting("Linear warm-up steps at the start of each phase.")
    clip: float = setting("Gradient norm clip.")
    alpha: float = setting("Weight of the distillation KL.")
    gamma: float = setting("Weight of the cross-entropy.")
    tau: float = setting("Distillation temperature.")
    k: int | None = setting("Learn from at most this many stored ids; default all.")
    dtype: Literal["float32", "bfloat16"] = setting("Compute type (bfloat16 keeps fp32 masters).")
    deepspeed_config: str = setting("A name in launch/deepspeed (zero0..zero3) or a JSON file.")
    head_positions: int = setting("Positions per chunk of the fused head and loss.")
    validate_every: int = setting("Steps between validations; 0: only at phase ends.")
    checkpoint_every: int = setting("Steps between checkpoints; 0: only at phase ends.")
    seed: int = setting("Seed of new weights and of the data order.")

    def __post_init__(self) -> None:
        positive = (
            "blocks",
            "layers_per_block",
            "steps_per_phase",
            "batch_rows",
            "head_positions",
            "lr",
            "clip",
            "tau",
            "k",
            "d_model",
            "heads",
            "kv_heads",
            "head_dim",
            "d_ff",
            "micro_rows",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name}: found {value}, expected a number above 0")
        not_negative = (
            "warmup_steps",
            "validate_every",
            "checkpoint_every",
            "alpha",
            "gamma",
            "seed",
        )
        for name in not_negative:
            if getattr(self, name) < 0:
                raise UsageError(f"{name}: found {getattr(self, name)}, expected 0 or more")
        if self.alpha == 0 and self.gamma == 0:
            raise UsageError("alpha and gamma are both 0: there is nothing to train on")
        if self.warmup_steps >= self.steps_per_phase:
            raise UsageError(
                f"warmup_steps {self.warmup_steps} fills the phase of {self.steps_per_phase} "
                "steps: give fewer"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a student; `blocks` counts the active ones."""

    norm: str
    blocks: int
    layers_per_block: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float

    @property
    def layers(self) -> int:
        return self.blocks * self.layers_per_block


def model_config(
    run: RunConfig, vocab_size: int, teacher: dict[str, Any] | None, active_blocks: int
) -> ModelConfig:
    """The student's shape; `teacher` is the config.json of a transformers model, or None.

    Raises UsageError where neither the run nor the teacher gives a size, or the sizes disagree.
    """
    teacher = teacher or {}
    heads = teacher.get("num_attention_heads")
    width = teacher.get("hidden_size")
    defaults = {
        "d_model": width,
        "heads": heads,
        "kv_heads": teacher.get("num_key_value_heads", heads),
        "head_dim": teacher.get("head_dim") or (width and heads and width // heads),
        "d_ff": teacher.get("intermediate_size"),
    }
    sizes = {}
    for name, default in defaults.items():
        sizes[name] = getattr(run, name) or default
        if sizes[name] is None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"the cache holds no teacher to take {name} from: give {flag}")
    if run.embedding == "teacher" and sizes["d_model"] != width:
        raise UsageError(
            f"d_model: found {sizes['d_model']}, but the teacher's embedding is {width} wide; drop "
            "--d-model or give --embedding random"
        )
    if sizes["heads"] % sizes["kv_heads"] or sizes["head_dim"] % 2:
        raise UsageError(
            f"heads {sizes['heads']} must be a multiple of kv_heads {sizes['kv_heads']}, and "
            f"head_dim {sizes['head_dim']} even"
        )
    rope = teacher.get("rope_parameters") or {}
    return ModelConfig(
        norm=run.norm,
        blocks=active_blocks,
        layers_per_block=run.layers_per_block,
        vocab_size=vocab_size,
        rope_theta=float(rope.get("rope_theta") or teacher.get("rope_theta") or 10_000.0),
        rms_norm_eps=float(teacher.get("rms_norm_eps") or 1e-6),
        **sizes,
    )
