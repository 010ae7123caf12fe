"""Settings of a dump: one frozen dataclass, filled from a preset and the command line."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shared.config import setting
from shared.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DumpConfig:
    """Everything that decides what a cache holds, and how much is computed at once.

    Raises UsageError for a value out of range or for kind `topk` without a teacher.
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
    kind: Literal["topk", "tokens"] = setting("Records: the teacher's top k, or tokens alone.")
    k: int = setting("Ids stored per token position.")
    dtype: Literal["float32", "bfloat16"] = setting("Type the teacher's layers compute in.")
    batch_tokens: int = setting("Tokens, padding included, of one forward pass.")
    head_positions: int = setting("Positions whose full-vocabulary logits exist at once.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 2 if field.name == "max_length" else 1
            if isinstance(value, int) and value < least:
                raise UsageError(f"{field.name}: found {value}, expected at least {least}")
        if not 0 < self.validation_fraction < 1:
            raise UsageError(
                f"validation_fraction: found {self.validation_fraction}, expected between 0 and 1"
            )
        if self.kind == "topk" and self.teacher is None:
            raise UsageError("kind topk needs a teacher: give --teacher, or --kind tokens")
        if self.teacher is None and self.tokenizer is None:
            raise UsageError("kind tokens needs a tokenizer: give --tokenizer or --teacher")
