"""Exports: safetensors weights, a config and the tokenizer, in transformers' layout.

A pre-norm student is a Qwen3 model: AutoModelForCausalLM.from_pretrained opens its export. Other
placements carry `model_type: stackgrow` and are opened by `load_student`.
"""

import json
import os
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shared.errors import DamagedError, UsageError
from shared.files import fsync
from shared.sidecar import INDEX
from student_train.config import ModelConfig
from student_train.model import Student


def write_export(
    out: Path, config: ModelConfig, weights: dict[str, torch.Tensor], tokenizer: Path
) -> None:
    """Write an export folder; it appears whole (an interrupted one leaves `.tmp-*`).

    weights: name -> tensor, any float type. tokenizer: a model folder; its other files are
    copied.
    """
    temporary = out.parent / f".tmp-{uuid.uuid4().hex}-{out.name}"
    temporary.mkdir(parents=True)
    save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)  # safetensors makes private files
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    content = {**hf_config(config), "dtype": dtype, "stackgrow": asdict(config)}
    (temporary / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    for file in sorted(tokenizer.iterdir()):
        if file.name not in ("config.json", INDEX) and file.suffix != ".safetensors":
            shutil.copy(file, temporary)
    for file in temporary.iterdir():
        fsync(file)
    if out.exists():  # left by a killed run that will now write the same again
        shutil.rmtree(out)
    os.replace(temporary, out)
    fsync(out.parent)


def hf_config(config: ModelConfig) -> dict:
    """The student's shape in transformers' names."""
    stock = config.norm == "pre"
    return {
        "architectures": ["Qwen3ForCausalLM" if stock else "StackGrowForCausalLM"],
        "model_type": "qwen3" if stock else "stackgrow",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def load_student(folder: Path) -> Student:
    """Open an export of any placement. Raises UsageError where `folder` is not one."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"no export at {folder}: expected a folder with config.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    if "stackgrow" not in content:
        raise UsageError(f"{path} was not written by student-train")
    student = Student(ModelConfig(**content["stackgrow"]))
    student.load_state_dict(load_weights(folder / "model.safetensors"))
    return student


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises DamagedError if it does not open."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{path} is damaged or missing ({error}): restore it") from None


def export_run(run: Path, phase: int | None, out: Path, dtype: str) -> Path:
    """Copy a phase's export (default the last) to `out`, its weights as `dtype`."""
    exports = sorted((run / "export").glob("phase-*"), key=lambda p: int(p.name[6:]))
    if not exports:
        raise UsageError(f"{run} has no finished phase: expected {run}/export/phase-0")
    source = exports[-1] if phase is None else run / "export" / f"phase-{phase}"
    if source not in exports:
        names = ", ".join(path.name for path in exports)
        raise UsageError(f"{run} has no {source.name}; found {names}")
    if out.exists():
        raise UsageError(f"{out} exists: give --out a new folder")
    student = load_student(source)
    kind = getattr(torch, dtype)
    weights = {name: tensor.to(kind) for name, tensor in student.state_dict().items()}
    write_export(out, student.config, weights, source)
    return source
