"""The teacher and its tokenizer: loading, identity, logits, and what the student gets from them.

The layers compute in the dtype asked for; the head product and everything after it is float32,
because a bfloat16 product ties a third of neighbouring ids and costs 2e-4 nats.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shared.distributed import ranks
from shared.errors import UsageError
from shared.files import sha256_files
from shared.sidecar import WEIGHTS, write_sidecar
from shared.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """A frozen language model, cut where its head begins.

    Heads are padded to round numbers (Qwen3: 151 936 rows for 151 669 ids). The rows above the
    tokenizer's ids are left out here: no record names one, and probabilities sum to 1 without them.
    """

    model: nn.Module
    decoder: Callable[..., Any]  # everything below the head, final norm included
    head: torch.Tensor  # float32 [token ids, width]
    bias: torch.Tensor | None  # float32 [token ids]
    ends: dict[str, torch.Tensor]  # what a student starts from, whole, in the teacher's dtype
    device: torch.device


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


def write_teacher_sidecar(
    cache: Store,
    fingerprint: dict[str, Any],
    tokenizer_folder: Path,
    teacher_folder: Path | None,
    teacher: Teacher | None,
) -> None:
    """Write what a student needs beside the shards; see shared/sidecar.py for the files."""
    files = tokenizer_files(tokenizer_folder)
    with tempfile.TemporaryDirectory() as temporary:
        if teacher is not None:
            from safetensors.torch import save_file

            weights = Path(temporary) / WEIGHTS
            save_file({name: t.cpu().clone() for name, t in teacher.ends.items()}, weights)
            weights.chmod(0o644)  # safetensors makes private files
            files += [teacher_folder / "config.json", weights]
        write_sidecar(cache, fingerprint, files)


def final_norm(decoder: nn.Module) -> nn.Module:
    """The norm before the head. Raises UsageError if there is none by a name we know."""
    norm = next((getattr(decoder, n) for n in FINAL_NORM_NAMES if hasattr(decoder, n)), None)
    if norm is None:
        raise UsageError(
            f"{type(decoder).__name__} has no final norm by one of the names "
            f"{', '.join(FINAL_NORM_NAMES)}: this teacher is not supported"
        )
    return norm


@torch.inference_mode()
def _final_gain(decoder: nn.Module) -> torch.Tensor:
    """The gain [width] of the final norm, as y = gain * x / rms(x).

    Some families store gain - 1, so we compare the weight with what the norm does to a vector
    of RMS 1 and mean 0, and believe the latter.
    """
    norm = final_norm(decoder)
    signs = torch.ones_like(norm.weight)
    signs[1::2] = -1
    effect = norm.forward(signs) * signs  # not norm(signs): ZeRO-3 would partition it again
    same = torch.allclose(effect.float(), norm.weight.float(), rtol=0.02, atol=1e-3)
    return norm.weight if same else effect


# Model


def load_teacher(folder: Path, dtype: str, token_ids: int) -> Teacher:
    """Load the teacher in `folder` on this worker's device, frozen.

    `dtype`: `float32` or `bfloat16`; `token_ids`: how many ids the tokenizer has.
    Raises UsageError if its logits are not head(hidden).
    """
    device, placed = torch.device("cpu"), {}
    if torch.cuda.is_available():
        device = torch.device("cuda", ranks().local_rank % torch.cuda.device_count())
        placed = {"device_map": {"": device}}  # no copy of the weights in main memory
    teacher = cut_teacher(load_model(folder, dtype, **placed), token_ids, device)
    check_head(teacher)
    return teacher


def load_model(folder: Path, dtype: str, **placed: Any) -> nn.Module:
    """The model in `folder`, frozen. Raises UsageError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
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
    return model.eval().requires_grad_(False)


def cut_teacher(model: nn.Module, token_ids: int, device: torch.device) -> Teacher:
    """The model as a Teacher. Raises UsageError if it has no head or no final norm we know."""
    output = model.get_output_embeddings()
    decoder = model.base_model
    if output is None or decoder is model:
        raise UsageError(f"found {type(model).__name__}, expected a causal language model")
    bias = getattr(output, "bias", None)
    bias = None if bias is None else bias[:token_ids].float()
    ends = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
        "lm_head.weight": output.weight.detach(),
        "norm.weight": _final_gain(decoder).detach(),
    }
    return Teacher(model, decoder, output.weight[:token_ids].float(), bias, ends, device)


@torch.inference_mode()
def check_head(teacher: Teacher) -> None:
    """Raise UsageError if the model's logits are not head(hidden), e.g. scaled or capped.

    Compared on a few tokens, relative to the largest logit.
    """
    ids = torch.arange(min(16, len(teacher.head)), device=teacher.device)[None]
    theirs = teacher.model(input_ids=ids).logits[..., : len(teacher.head)].float()
    ours = head_logits(teacher, teacher.decoder(input_ids=ids).last_hidden_state)
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    tolerance = HEAD_TOLERANCE[teacher.model.dtype]
    if not error <= tolerance:
        raise UsageError(
            f"{type(teacher.model).__name__} changes its logits after the head (scale or cap): "
            f"they differ from head(hidden) by {error:.1e} of the largest, expected below "
            f"{tolerance:.0e}; the records would be wrong, use another teacher"
        )


def head_logits(teacher: Teacher, hidden: torch.Tensor) -> torch.Tensor:
    """float32 logits [..., token ids] of hidden states [..., width]."""
    return nn.functional.linear(hidden.float(), teacher.head, teacher.bias)
