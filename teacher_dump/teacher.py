"""The teacher and its tokenizer: loading, top-k records, and what the student gets beside them.

The layers compute in the dtype asked for; the head product and everything after it is float32,
because a bfloat16 product ties a third of neighbouring ids and costs 2e-4 nats.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shared.distributed import ranks
from shared.errors import UsageError, differences
from shared.files import replacing, sha256_files
from shared.records import TopK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIDECAR = "teacher"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
# Of the largest logit: rounding stays below, a cap or a scale above.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Teacher:
    """A frozen language model, cut where its head begins."""

    model: nn.Module
    decoder: nn.Module  # everything below the head, final norm included
    head: torch.Tensor  # float32 [vocab, width]
    bias: torch.Tensor | None  # float32 [vocab]
    device: torch.device

    @property
    def vocab_size(self) -> int:
        """Rows of the head; it may exceed the tokenizer's ids."""
        return self.head.shape[0]


# Tokenizer


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in `folder`. Raises UsageError."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UsageError(f"{folder} has no tokenizer: expected tokenizer.json in it")
    logging.set_verbosity_error()  # "sequence longer than the model allows": rows are truncated
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for broken files
        raise UsageError(f"cannot load the tokenizer in {folder}: {error}") from None


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of `folder` that belong to its tokenizer, by name."""
    found = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def tokenizer_sha256(folder: Path) -> str:
    """Digest of what turns text into ids: tokenizer.json, or all its files if there is none."""
    whole = folder / "tokenizer.json"
    return sha256_files([whole] if whole.is_file() else tokenizer_files(folder))


def token_id_count(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest id of the tokenizer."""
    return max(tokenizer.get_vocab().values()) + 1


# Identity and sidecar


def teacher_identity(folder: Path, name: str, revision: str | None) -> dict[str, Any]:
    """The teacher's part of a fingerprint. Raises UsageError if `folder` is no teacher."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: expected a teacher saved by transformers")
    weights = weight_files(folder)
    if not weights:
        raise UsageError(
            f"{folder} has no *.safetensors: expected weights saved with save_pretrained"
        )
    return {
        "name": folder.absolute().name if Path(name).is_dir() else name,
        "revision": revision,
        "config_sha256": sha256_files([folder / "config.json"]),
        "weights_sha256": sha256_files(weights),
    }


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a teacher, by name."""
    return sorted(folder.glob("*.safetensors"))


def vocab_size(folder: Path) -> int:
    """Rows of the head, from the teacher's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise UsageError(f"{folder}/config.json: vocab_size is {size!r}, expected a number")
    return size


def write_sidecar(
    out: Path,
    fingerprint: dict[str, Any],
    tokenizer_folder: Path,
    teacher_folder: Path | None,
    teacher: Teacher | None,
) -> None:
    """Write `out`/teacher, whole or not at all; another worker may be first.

    The tokenizer's files; with a teacher also its config.json and teacher.safetensors:
    `embed_tokens.weight` and `lm_head.weight` [vocab, width], `norm.weight` [width].
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".tmp-") as temporary:
        folder = Path(temporary) / SIDECAR
        copies = tokenizer_files(tokenizer_folder)
        if teacher is not None:
            copies = [*copies, teacher_folder / "config.json"]
        for path in copies:
            with replacing(folder / path.name) as copy:
                shutil.copyfile(path, copy)
        if teacher is not None:
            from safetensors.torch import save_file

            with replacing(folder / "teacher.safetensors") as file:
                save_file(_ends(teacher), file, {**fingerprint["teacher"], "revision": ""})
                file.chmod(0o644)  # safetensors makes private files
        try:
            os.rename(folder, out / SIDECAR)
        except OSError:
            if not (out / SIDECAR).is_dir():
                raise


def _ends(teacher: Teacher) -> dict[str, torch.Tensor]:
    """The tensors a student starts from, in the teacher's dtype; a tied head is a copy."""
    tensors = {
        "embed_tokens.weight": teacher.model.get_input_embeddings().weight,
        "lm_head.weight": teacher.model.get_output_embeddings().weight,
        "norm.weight": _final_gain(teacher.decoder),
    }
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


@torch.inference_mode()
def _final_gain(decoder: nn.Module) -> torch.Tensor:
    """The gain [width] of the final norm, as y = gain * x / rms(x).

    Some families store gain - 1, so we compare the weight with what the norm does to a vector
    of RMS 1 and mean 0, and believe the latter.
    """
    norm = next((getattr(decoder, n) for n in FINAL_NORM_NAMES if hasattr(decoder, n)), None)
    if norm is None:
        raise UsageError(
            f"{type(decoder).__name__} has no final norm by one of the names "
            f"{', '.join(FINAL_NORM_NAMES)}: this teacher is not supported"
        )
    signs = torch.ones_like(norm.weight)
    signs[1::2] = -1
    effect = norm(signs) * signs
    same = torch.allclose(effect.float(), norm.weight.float(), rtol=0.02, atol=1e-3)
    return norm.weight if same else effect


def sidecar_fault(out: Path, fingerprint: dict[str, Any]) -> str | None:
    """What is wrong with `out`/teacher for a cache with this fingerprint; None if nothing is."""
    folder = out / SIDECAR
    if not folder.is_dir():
        return f"{folder} is missing: run the same teacher-dump again, it makes what is missing"
    found: dict[str, Any] = {"tokenizer_sha256": tokenizer_sha256(folder)}
    if fingerprint["kind"] == "topk":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(folder / "teacher.safetensors", "pt") as file:
                found["weights_sha256"] = file.metadata()["weights_sha256"]
            found["config_sha256"] = sha256_files([folder / "config.json"])
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            return f"{folder} is damaged ({error}): delete it and run the same teacher-dump again"
    expected = {key: fingerprint.get(key, fingerprint["teacher"].get(key)) for key in found}
    if found != expected:
        return f"{folder} belongs to another cache:\n{differences(found, expected)}"
    return None


# Model


def load_teacher(folder: Path, dtype: str) -> Teacher:
    """Load the teacher in `folder` on this worker's device, frozen.

    `dtype`: `float32` or `bfloat16`. Raises UsageError if its logits are not head(hidden).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    device, placed = torch.device("cpu"), {}
    if torch.cuda.is_available():
        device = torch.device("cuda", ranks().local_rank % torch.cuda.device_count())
        placed = {"device_map": {"": device}}  # no copy of the weights in main memory
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            **placed,
        )
    except Exception as error:  # transformers raises many types for broken folders
        raise UsageError(f"cannot load the teacher in {folder}: {error}") from None
    model.eval().requires_grad_(False)
    output = model.get_output_embeddings()
    decoder = model.base_model
    if output is None or decoder is model:
        raise UsageError(f"{folder} is no causal language model with a head: found {type(model)}")
    bias = getattr(output, "bias", None)
    teacher = Teacher(
        model, decoder, output.weight.float(), None if bias is None else bias.float(), device
    )
    check_head(teacher)
    return teacher


@torch.inference_mode()
def check_head(teacher: Teacher) -> None:
    """Raise UsageError if the model's logits are not head(hidden), e.g. scaled or capped.

    Compared on a few tokens, relative to the largest logit.
    """
    ids = torch.arange(min(16, teacher.vocab_size), device=teacher.device)[None]
    theirs = teacher.model(input_ids=ids).logits.float()
    ours = _logits(teacher, teacher.decoder(input_ids=ids).last_hidden_state)
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    tolerance = HEAD_TOLERANCE[teacher.model.dtype]
    if not error <= tolerance:
        raise UsageError(
            f"{type(teacher.model).__name__} changes its logits after the head (scale or cap): "
            f"they differ from head(hidden) by {error:.1e} of the largest, expected below "
            f"{tolerance:.0e}; the records would be wrong, use another teacher"
        )


def _logits(teacher: Teacher, hidden: torch.Tensor) -> torch.Tensor:
    """float32 logits [..., vocab] of hidden states [..., width]."""
    return nn.functional.linear(hidden.float(), teacher.head, teacher.bias)


@torch.inference_mode()
def records(teacher: Teacher, rows: list[np.ndarray], k: int, head_positions: int) -> list[TopK]:
    """Top-k records of token rows (int32 [T]), one padded batch; a row has T - 1 records.

    `head_positions` bounds how many full-vocabulary logit vectors exist at once.
    Raises UsageError if the teacher's logits are not finite.
    """
    counts = [max(0, len(row) - 1) for row in rows]
    width = max(len(row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    scored = np.zeros((len(rows), width), dtype=bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)], scored[i, : counts[i]] = row, 1, True
    ids, mask, scored = (torch.from_numpy(a).to(teacher.device) for a in (ids, mask, scored))
    hidden = teacher.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[
        scored
    ]
    parts = [_top_k(teacher, chunk, k) for chunk in hidden.split(head_positions)]
    joined = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    if not np.isfinite(joined[3]).all():
        raise UsageError(
            "the teacher's logits are not finite (overflow or broken weights): try --dtype float32"
        )
    edges = np.cumsum(counts)[:-1]
    return [TopK(*row) for row in zip(*(np.split(a, edges) for a in joined), strict=True)]


def _top_k(teacher: Teacher, hidden: torch.Tensor, k: int) -> tuple[np.ndarray, ...]:
    """TopK's four arrays for hidden states [positions, width]."""
    logits = _logits(teacher, hidden)
    top, ids = logits.topk(k, dim=-1)
    logsumexp = logits.logsumexp(dim=-1)
    # The tail from the other logits themselves: 1 - sum(top) would be rounding noise.
    tail = logits.scatter_(-1, ids, -torch.inf).logsumexp(dim=-1) - logsumexp
    arrays = (ids.int(), top - logsumexp[:, None], tail, logsumexp)
    return tuple(array.cpu().numpy() for array in arrays)
