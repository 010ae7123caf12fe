"""The student of each phase: which blocks are active, and where their weights come from.

An append keeps the blocks below, the head and the extra norm, and draws the new block at random
from the run's seed (the paper's append). The extra norm of a pre-norm stack is read after the top
active block, so it moves up by itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.errors import DamagedError, UsageError
from shared.sidecar import WEIGHTS
from student_train.config import RunConfig, model_config
from student_train.export import load_weights
from student_train.model import Student, initialise, width_rule_std


@dataclass(frozen=True)
class Phase:
    """Training between two appends."""

    index: int
    active_blocks: int
    steps: int
    first_step: int  # steps of the run before this phase


def phases(run: RunConfig) -> list[Phase]:
    """`joint`: one phase with every block. `grow`: one phase per block, bottom up."""
    depths = [run.blocks] if run.curriculum == "joint" else list(range(1, run.blocks + 1))
    steps = run.steps_per_phase
    return [Phase(i, depth, steps, i * steps) for i, depth in enumerate(depths)]


def teacher_config(sidecar: Path) -> dict[str, Any] | None:
    """config.json of the teacher whose cache it is; None for a cache of tokens alone."""
    path = sidecar / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def build_student(run: RunConfig, sidecar: Path, vocab_size: int, active_blocks: int) -> Student:
    """A student as it stands before its first step: seeded weights, the teacher's ends."""
    config = model_config(run, vocab_size, teacher_config(sidecar), active_blocks)
    student = Student(config, run.head_positions)
    initialise(student, run.seed, run.init_std or width_rule_std(config.d_model))
    if run.embedding == "random":
        return student
    path = sidecar / WEIGHTS
    if not path.is_file():
        raise UsageError(f"{sidecar} holds no teacher weights ({WEIGHTS}): give --embedding random")
    teacher = load_weights(path)
    extra = student.model.norm if student.model.norm is not None else student.model.entry_norm
    targets = {
        "embed_tokens.weight": student.model.embed_tokens.weight,
        "lm_head.weight": student.lm_head.weight,
        "norm.weight": extra.weight,
    }
    for name, parameter in targets.items():
        if teacher[name].shape != parameter.shape:
            raise DamagedError(
                f"{path}: {name} has shape {tuple(teacher[name].shape)}, the student needs "
                f"{tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(teacher[name])
    student.model.embed_tokens.weight.requires_grad_(False)
    return student


def inherit(student: Student, export: Path) -> None:
    """Take over every tensor of the previous phase's export; new blocks keep theirs."""
    weights = load_weights(export / "model.safetensors")
    own = student.state_dict()
    foreign = [n for n in weights if n not in own or own[n].shape != weights[n].shape]
    if foreign:
        raise DamagedError(f"{export} does not fit this run: {foreign[0]} differs in name or shape")
    student.load_state_dict(weights, strict=False)
