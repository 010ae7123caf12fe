"""Settings of a dump: one frozen dataclass, filled from a preset and the command line."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shared.config import setting
from shared.errors import UsageError

MOST = 65535  # ids of a position: they are counted in 16 bits


@dataclass(frozen=True, kw_only=True)
class DumpConfig:
    """Everything that decides what a cache holds, and how much is computed at once.

    Raises UsageError for a value out of range, or records without a teacher.
    """

    teacher: str | None = setting("Teacher: a directory, a hub name, or `tiny`, which is shipped.")
    revision: str | None = setting("Revision of a hub teacher: a branch, tag or commit.")
    tokenizer: str | None = setting("Tokenizer directory or hub name; default: the teacher's.")
    data: str = setting(
        "Text: .txt, .json, .jsonl, .jsonl.zst or .parquet files, folders, globs, a hub dataset "
        "or `stdlib` (the definitions in Python's standard library). Takes several values."
    )
    data_config: str | None = setting("Configuration of a hub dataset.")
    text_field: str = setting("Field of the JSON or Parquet files that holds the text.")
    shards: int = setting("Number of train shards (files).")
    validation_shards: int = setting("Number of validation shards.")
    validation_fraction: float = setting("Share of the documents held out, chosen by their hash.")
    max_rows: int | None = setting("Use at most this many train documents.")
    max_validation_rows: int | None = setting("Use at most this many validation documents.")
    max_length: int = setting("Truncate a document to this many tokens.")
    kind: Literal["topk", "sample", "tokens"] = setting(
        "Records: the teacher's top k, draws from it, or tokens alone."
    )
    k: int = setting("topk: ids stored per token position, at most.")
    min_prob: float | None = setting("topk: store no id below this probability; the best always.")
    top_p: float | None = setting("topk: stop after the ids that first reach this mass.")
    samples: int = setting("sample: draws per token position, with replacement.")
    sample_seed: int = setting("sample: seed of the draws.")
    dtype: Literal["float32", "bfloat16"] = setting("Type the teacher's layers compute in.")
    parallel: Literal["data", "zero3", "tensor"] = setting(
        "data: every rank holds the teacher; zero3: weights partitioned over all ranks; tensor: "
        "layers split over --tp-size ranks."
    )
    tp_size: int | None = setting("tensor: ranks that share one teacher; default all.")
    batch_tokens: int = setting("Tokens, padding included, of one forward pass.")
    head_positions: int = setting("Positions whose full-vocabulary logits exist at once.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = {"max_length": 2, "sample_seed": 0}.get(field.name, 1)
            if isinstance(value, int) and value < least:
                raise UsageError(f"{field.name}: found {value}, expected at least {least}")
        for name in ("k", "samples"):
            if getattr(self, name) > MOST:
                raise UsageError(f"{name}: found {getattr(self, name)}, expected at most {MOST}")
        for name in ("min_prob", "top_p"):
            value = getattr(self, name)
            if value is not None and self.kind != "topk":
                raise UsageError(f"{name} is for kind topk, found kind {self.kind}")
            if value is not None and not 0 < value < 1:
                raise UsageError(f"{name}: found {value}, expected between 0 and 1")
        if self.tp_size is not None and self.parallel != "tensor":
            raise UsageError(f"tp_size is for parallel tensor, found parallel {self.parallel}")
        if not 0 < self.validation_fraction < 1:
            raise UsageError(
                f"validation_fraction: found {self.validation_fraction}, expected between 0 and 1"
            )
        if self.kind != "tokens" and self.teacher is None:
            raise UsageError(f"kind {self.kind} needs a teacher: give --teacher, or --kind tokens")
        if self.teacher is None and self.tokenizer is None:
            raise UsageError("kind tokens needs a tokenizer: give --tokenizer or --teacher")
