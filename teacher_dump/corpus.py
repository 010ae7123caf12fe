"""Documents: where they come from, which are train and validation, and their token rows.

A document's split depends on the SHA-256 of its text alone, so it is the same in every cache
made from the same text, whatever the tokenizer, the limits or the order of the files.
"""

import glob
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import UsageError
from teacher_dump.hub import is_hub_name, load_hub_dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# extension -> builder of the datasets library; None: read as one document
BUILDERS = {
    ".txt": None,
    ".json": "json",
    ".jsonl": "json",
    ".jsonl.zst": "json",
    ".parquet": "parquet",
}
SCAN_DOCUMENTS = 1000  # documents fetched at once while all are hashed


@dataclass(frozen=True)
class RowPlan:
    """Which documents are the rows of each split: row i of a split is document `split[i]`."""

    train: np.ndarray  # int64 [rows], document numbers, rising
    validation: np.ndarray  # int64 [rows], document numbers, rising
    sha256: str  # of the texts of all documents in the plan, in corpus order


class Documents(Sequence[str]):
    """Several sequences of texts as one, by document number; plain slices give lists."""

    def __init__(self, parts: list[tuple[str, Sequence[str]]]) -> None:
        """`parts`: (name for messages, texts)."""
        self._parts = parts
        self._edges = np.cumsum([0] + [len(part) for _, part in parts])

    def __len__(self) -> int:
        return int(self._edges[-1])

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            first, end, _ = number.indices(len(self))
            texts: list[str] = []
            for part, edge in enumerate(self._edges[:-1]):
                texts += self._get(part, slice(max(0, first - edge), max(0, end - edge)))
            return texts
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = int(np.searchsorted(self._edges, number, side="right")) - 1
        return self._get(part, int(number - self._edges[part]))

    def _get(self, part: int, where: Any) -> Any:
        name, texts = self._parts[part]
        try:
            return texts[where]
        except UnicodeDecodeError as error:  # found only when a text is looked at
            raise UsageError(f"{name}: a text is not UTF-8 ({error}): convert it first") from None


def load_documents(data: str, data_config: str | None, text_field: str) -> Documents:
    """All documents of `data`: one source a line, each `stdlib`, a path, a glob or a hub name.

    JSON and Parquet are memory-mapped. Raises UsageError for data that is missing, unreadable,
    of an unknown kind, or without the text field.
    """
    parts: list[tuple[str, Sequence[str]]] = []
    for source in data.splitlines():
        if source == "stdlib" and not Path(source).exists():
            from teacher_dump.stdlib_corpus import stdlib_documents

            parts.append((source, stdlib_documents()))
        elif is_hub_dataset(source):
            dataset = load_hub_dataset(source, data_config)
            parts.append((source, _texts(dataset, text_field, source)))
        else:
            parts += _load_files(_files(source), text_field)
    documents = Documents(parts)
    if len(documents) == 0:
        raise UsageError(f"{data}: no documents found")
    return documents


def is_hub_dataset(source: str) -> bool:
    """Whether this source of data would be fetched from the hub."""
    return is_hub_name(source) and _suffix(source) is None


def _suffix(name: str) -> str | None:
    """The known extension of a file name."""
    return next((end for end in BUILDERS if name.lower().endswith(end)), None)


def _files(source: str) -> list[str]:
    """The files that a path, a folder or a glob names, sorted; all of a known extension."""
    path = Path(source)
    if path.is_file():
        if _suffix(source) is None:
            raise UsageError(
                f"{source}: unknown extension {path.suffix!r}, expected one of {_extensions()}"
            )
        return [source]
    if path.is_dir():
        found = [str(p) for p in path.rglob("*") if p.is_file()]
    else:
        found = [p for p in glob.glob(source, recursive=True) if Path(p).is_file()]
        if not found:
            raise UsageError(
                f"no data at {source!r}: expected a file, a folder, a glob or `stdlib`"
            )
    files = sorted(p for p in found if _suffix(p))
    if not files:
        raise UsageError(f"{source}: none of its {len(found)} files has one of {_extensions()}")
    return files


def _extensions() -> str:
    return ", ".join(BUILDERS)


def _load_files(files: list[str], text_field: str) -> list[tuple[str, Sequence[str]]]:
    """Read files, runs of one kind together so that thousands of files stay one table."""
    parts: list[tuple[str, Sequence[str]]] = []
    for builder, group in itertools.groupby(files, lambda name: BUILDERS[_suffix(name)]):
        names = list(group)
        if builder is None:
            parts.append((names[0], [_read_text(name) for name in names]))
            continue
        import datasets

        datasets.disable_progress_bars()
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        try:
            dataset = datasets.load_dataset(builder, data_files=names, split="train")
        except Exception as error:  # bad JSON, bad Parquet, differing columns, wrong encoding
            cause = str(error.__cause__ or "") or str(error) or "it is empty or truncated"
            raise UsageError(f"cannot read {_culprit(names) or shown}: {cause}") from None
        parts.append((shown, _texts(dataset, text_field, shown)))
    return parts


def _culprit(names: list[str]) -> str | None:
    """The first line of plain JSON-lines files that does not parse, as `file:line`."""
    for name in names:
        if not name.lower().endswith(".jsonl"):
            continue
        with open(name, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    json.loads(line.decode("utf-8") if line.strip() else "{}")
                except ValueError:
                    return f"{name}:{number}"
    return None


def _read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first"
        ) from None


def _texts(dataset: Any, text_field: str, shown: str) -> Sequence[str]:
    """The text column of a dataset, still on disk."""
    if text_field not in dataset.column_names:
        raise UsageError(
            f"{shown}: no field {text_field!r}, found {', '.join(dataset.column_names) or 'none'}; "
            "give --text-field"
        )
    found = getattr(dataset.features[text_field], "dtype", "list")
    if found not in ("string", "large_string", "null"):
        raise UsageError(f"{shown}: field {text_field!r} holds {found}, expected strings")
    return dataset[text_field]


def is_validation(digest: bytes, fraction: float) -> bool:
    """Whether the document whose text has this SHA-256 is held out."""
    return int.from_bytes(digest[:4], "big") / 2**32 < fraction


def plan_rows(
    documents: Sequence[str], fraction: float, max_rows: int | None, max_validation: int | None
) -> RowPlan:
    """Choose the rows of both splits, in corpus order; blank documents are skipped.

    Stops reading once both limits are met. Raises UsageError if a split gets no rows.
    """
    limits = {True: max_validation, False: max_rows}
    chosen: dict[bool, list[int]] = {True: [], False: []}
    corpus, usable = hashlib.sha256(), 0
    for number, text in _numbered(documents):
        if not text or text.isspace():
            continue
        usable += 1
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        held_out = is_validation(digest, fraction)
        limit = limits[held_out]
        if limit is None or len(chosen[held_out]) < limit:
            chosen[held_out].append(number)
            corpus.update(digest)
        elif all(n is not None and len(chosen[s]) >= n for s, n in limits.items()):
            break
    for held_out, name in ((True, "validation"), (False, "train")):
        if not chosen[held_out]:
            raise UsageError(
                f"no {name} rows: {usable} documents with text in a corpus of {len(documents)}, "
                f"validation fraction {fraction}; give more documents or another "
                "--validation-fraction"
            )
    train, validation = (np.array(chosen[s], dtype=np.int64) for s in (False, True))
    return RowPlan(train, validation, corpus.hexdigest())


def _numbered(documents: Sequence[str]) -> Iterator[tuple[int, str | None]]:
    for first in range(0, len(documents), SCAN_DOCUMENTS):
        yield from enumerate(documents[first : first + SCAN_DOCUMENTS], start=first)


def token_rows(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], max_length: int
) -> list[np.ndarray]:
    """Token ids of each text: int32 [T], T <= max_length.

    The special tokens that the tokenizer adds by itself, then its end-of-text id unless it is
    already there; a document that is truncated has no end.
    """
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    rows = []
    for ids in encoded:
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        rows.append(np.array(ids[:max_length], dtype=np.int32))
    return rows
