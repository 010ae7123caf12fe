"""The cache: Parquet shards, a manifest derived from their footers, and the teacher's sidecar.

    CACHE/
      train-00000-of-00064.parquet ...   a contiguous range of rows each
      validation-00000-of-00001.parquet
      manifest.json                      written when every shard is there; rebuilt from footers
      teacher/                           config, tokenizer, embedding + head + final norm

Each footer holds, under the key `stackgrow`, a JSON object: `fingerprint` (everything that
decided the contents), `split`, `index`, `count`, `first_row`, `end_row`. Which rows a shard holds
depends on the fingerprint and the shard count only. Page checksums are written and verified.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shared.errors import DamagedError, UsageError, differences
from shared.files import atomic_write_text, replacing
from shared.records import Row, from_table, schema, to_table

FORMAT_VERSION = 1
GROUP_ROWS = 64  # rows of a Parquet row group: what a reader decodes at once
FOOTER_KEY = b"stackgrow"
SHARD_NAME = re.compile(r"(train|validation)-(\d{5})-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class Shard:
    """One shard's place: rows [first_row, end_row) of `split`."""

    split: str
    index: int
    count: int
    first_row: int
    end_row: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.index:05d}-of-{self.count:05d}.parquet"


def plan_shards(split: str, rows: int, count: int) -> list[Shard]:
    """Divide `rows` rows into `count` contiguous shards whose sizes differ by at most one."""
    if not 1 <= count <= rows:
        raise UsageError(
            f"{count} {split} shards for {rows} rows: expected 1 to {rows}; "
            "give fewer shards or more data"
        )
    edges = [index * rows // count for index in range(count + 1)]
    return [Shard(split, i, count, edges[i], edges[i + 1]) for i in range(count)]


def identity(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The part of a fingerprint that must agree; library versions may differ between shards."""
    return {key: value for key, value in fingerprint.items() if key != "versions"}


def write_shard(
    folder: Path, shard: Shard, fingerprint: dict[str, Any], groups: Iterable[list[Row]]
) -> None:
    """Write `shard` from groups of at most GROUP_ROWS rows each; appears whole or not at all."""
    kind = fingerprint["kind"]
    footer = {"fingerprint": fingerprint, **asdict(shard)}
    with (
        replacing(folder / shard.name) as temporary,
        pq.ParquetWriter(
            temporary,
            schema(kind).with_metadata({FOOTER_KEY: json.dumps(footer)}),
            compression="zstd",
            use_dictionary=False,
            use_byte_stream_split=False,
            write_page_checksum=True,
        ) as writer,
    ):
        for rows in groups:
            writer.write_table(to_table(rows, kind), row_group_size=GROUP_ROWS)


def read_footer(path: Path) -> dict[str, Any]:
    """The footer object of a shard. Raises DamagedError if the file is no whole shard of ours."""
    try:
        metadata = pq.read_metadata(path)
        footer = json.loads((metadata.metadata or {})[FOOTER_KEY])
        rows = footer["end_row"] - footer["first_row"]
    except KeyError:
        raise DamagedError(f"{path} is a Parquet file, but not a shard of a cache") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(
            f"{path} is damaged ({error}): delete it and run the same teacher-dump again"
        ) from None
    if metadata.num_rows != rows:
        raise DamagedError(f"{path} holds {metadata.num_rows} rows, its footer promises {rows}")
    if footer["fingerprint"]["format"] != FORMAT_VERSION:
        raise DamagedError(
            f"{path} has format {footer['fingerprint']['format']}, this version reads "
            f"{FORMAT_VERSION}"
        )
    return footer


def read_lengths(path: Path) -> np.ndarray:
    """Tokens per row, int32 [rows], checksums verified. Raises DamagedError."""
    try:
        table = pq.read_table(path, columns=["length"], page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise DamagedError(f"{path} is damaged ({error}): delete it and dump again") from None
    return table["length"].to_numpy()


def check_shard(path: Path) -> None:
    """Read a whole shard, verifying every page checksum. Raises DamagedError."""
    footer = read_footer(path)
    kind, k = footer["fingerprint"]["kind"], footer["fingerprint"]["k"]
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = (file.read_row_group(group) for group in range(file.num_row_groups))
            numbers = [row.number for group in groups for row in from_table(group, kind, k)]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(
            f"{path} is damaged ({error}): delete it and run the same teacher-dump again"
        ) from None
    if not np.array_equal(numbers, np.arange(footer["first_row"], footer["end_row"])):
        raise DamagedError(f"{path}: row numbers are not those of its footer")


def shard_paths(folder: Path) -> list[Path]:
    """Shard files in `folder`, by name; temporary files are not shards."""
    return sorted(p for p in folder.glob("*.parquet") if SHARD_NAME.fullmatch(p.name))


def write_manifest(folder: Path) -> dict[str, Any]:
    """Derive manifest.json from the footers; DamagedError if a shard is missing or foreign."""
    paths = shard_paths(folder)
    if not paths:
        raise DamagedError(f"{folder} holds no shards: run teacher-dump --out {folder}")
    footers = [read_footer(path) for path in paths]
    fingerprint = footers[0]["fingerprint"]
    entries = []
    for path, footer in zip(paths, footers, strict=True):
        if identity(footer["fingerprint"]) != identity(fingerprint):
            raise DamagedError(
                f"{path} was made with other settings than {paths[0].name}:\n"
                + differences(identity(footer["fingerprint"]), identity(fingerprint))
            )
        entry = {key: footer[key] for key in ("split", "index", "count", "first_row", "end_row")}
        entries.append({"name": path.name, "bytes": path.stat().st_size, **entry})
    _check_tiling(folder, entries)
    manifest = {"fingerprint": fingerprint, "shards": entries}
    atomic_write_text(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def _check_tiling(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Refuse missing shards, and shards of two different counts, by name."""
    for split in sorted({entry["split"] for entry in entries} | {"train"}):
        part = [entry for entry in entries if entry["split"] == split]
        counts = {entry["count"] for entry in part}
        if len(counts) > 1:
            raise DamagedError(
                f"{folder} mixes {split} shards of two layouts: of {sorted(counts)}; "
                "keep the files of one"
            )
        count = counts.pop() if counts else 1
        missing = set(range(count)) - {entry["index"] for entry in part}
        if missing:
            names = [Shard(split, i, count, 0, 0).name for i in sorted(missing)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise DamagedError(
                f"{folder} is incomplete, missing {', '.join(names[:3])}{more}: run the same "
                "teacher-dump again, it makes only what is missing"
            )


class CacheReader:
    """Rows of one split by row number, decoding a row group at a time and keeping recent ones.

    Attributes: `fingerprint`; `lengths` int32 [rows], tokens per row; `vocab_size`.
    Raises DamagedError for a cache that is missing, incomplete or inconsistent.
    """

    def __init__(self, folder: Path, split: str, keep_groups: int = 64) -> None:
        manifest_path = folder / "manifest.json"
        if not folder.is_dir():
            raise UsageError(f"no cache at {folder}: make one with teacher-dump --out {folder}")
        if not manifest_path.is_file():
            write_manifest(folder)  # raises what is missing; else the footers say it all
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        self.fingerprint: dict[str, Any] = manifest["fingerprint"]
        self.vocab_size: int = self.fingerprint["vocab_size"]
        self._kind: str = self.fingerprint["kind"]
        self._paths: list[Path] = []
        self._first_rows: list[int] = []
        lengths = []
        for entry in manifest["shards"]:
            if entry["split"] != split:
                continue
            path = folder / entry["name"]
            if not path.is_file():
                raise DamagedError(f"{path} is missing: run the same teacher-dump again")
            footer = read_footer(path)
            if identity(footer["fingerprint"]) != identity(self.fingerprint):
                raise DamagedError(
                    f"{path} does not belong to this cache:\n"
                    + differences(identity(footer["fingerprint"]), identity(self.fingerprint))
                )
            self._paths.append(path)
            self._first_rows.append(footer["first_row"])
            lengths.append(read_lengths(path))
        if not lengths:
            raise DamagedError(f"{folder} holds no {split} rows")
        self.lengths = np.concatenate(lengths)
        self._files: dict[int, pq.ParquetFile] = {}
        self._groups: OrderedDict[tuple[int, int], list[Row]] = OrderedDict()
        self._keep_groups = keep_groups

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> Row:
        """The row with this number. Raises DamagedError if its page fails its checksum."""
        shard = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        group, offset = divmod(number - self._first_rows[shard], GROUP_ROWS)
        key = (shard, group)
        if key not in self._groups:
            self._groups[key] = self._decode(shard, group)
            if len(self._groups) > self._keep_groups:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key][offset]

    def _decode(self, shard: int, group: int) -> list[Row]:
        path = self._paths[shard]
        try:
            if shard not in self._files:
                self._files[shard] = pq.ParquetFile(path, page_checksum_verification=True)
            table = self._files[shard].read_row_group(group)
            return from_table(table, self._kind, self.fingerprint["k"])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DamagedError(f"{path} is damaged ({error}): delete it and dump again") from None
