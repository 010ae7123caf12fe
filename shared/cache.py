"""The cache: shards, a manifest derived from their footers, and the teacher's sidecar.

    CACHE/
      train-00000-of-00064.parquet ...   a contiguous range of rows each
      validation-00000-of-00001.parquet
      manifest.json                      written when every shard is there; rebuilt from footers
      teacher/                           config, tokenizer, embedding + head + final norm

Which rows a shard holds depends on the fingerprint and the shard count only. Nothing here trusts
the manifest: it tells people and other programs what the footers say.
"""

import json
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shared import codec
from shared.errors import DamagedError, UsageError, differences
from shared.records import Row, TopK
from shared.shardfile import (
    GROUP_ROWS,
    Footer,
    Shard,
    damage,
    identity,
    read_footer,
    read_group,
)
from shared.store import Store, open_store

MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"(train|validation)-(\d{5})-of-(\d{5})\.parquet")
OPEN_SHARDS = 16  # footers and files a reader holds at a time


def plan_shards(split: str, rows: int, count: int) -> list[Shard]:
    """Divide `rows` rows into `count` contiguous shards of nearly equal size.

    Where there are enough rows, shards begin at multiples of GROUP_ROWS: a block of the data order
    is then one row group, fetched once per epoch, and not the halves of two.
    """
    if not 1 <= count <= rows:
        raise UsageError(
            f"{count} {split} shards for {rows} rows: expected 1 to {rows}; "
            "give fewer shards or more data"
        )
    unit = GROUP_ROWS if rows >= 2 * GROUP_ROWS * count else 1
    edges = [index * (rows // unit) // count * unit for index in range(count)] + [rows]
    return [Shard(split, i, count, edges[i], edges[i + 1]) for i in range(count)]


def parquet_names(store: Store) -> list[str]:
    """Names of the Parquet files in a folder, unfinished ones apart."""
    return [n for n in store.names() if n.endswith(".parquet") and not n.startswith(".tmp-")]


def shard_names(store: Store) -> list[str]:
    """Names of the shards in a cache. Raises DamagedError for a Parquet file of another name."""
    names = parquet_names(store)
    for name in names:
        if not SHARD_NAME.fullmatch(name):
            raise DamagedError(f"{store.path(name)} is not the name of a shard: move it away")
    return names


def read_footers(store: Store) -> list[Footer]:
    """The footers of a whole cache, train shards first.

    Raises UsageError if there is no cache, DamagedError naming what is damaged, missing, foreign,
    or there twice.
    """
    names = shard_names(store)
    if not names:
        raise UsageError(f"no cache at {store}: make one with teacher-dump --out {store}")
    with ThreadPoolExecutor(16) as pool:  # remote ones wait for the network
        # Without Parquet's own metadata, which takes megabytes for a large shard.
        read = pool.map(partial(read_footer, store), names)
        footers = [replace(footer, parquet=None) for footer in read]
    check_whole(store, footers)
    return footers


def check_whole(store: Store, footers: list[Footer]) -> None:
    """Raise DamagedError unless these are all shards of one cache."""
    expected = identity(footers[0].fingerprint)
    for footer in footers:
        if identity(footer.fingerprint) != expected:
            raise DamagedError(
                f"{store.path(footer.shard.name)} was made with other settings than "
                f"{footers[0].shard.name}:\n" + differences(identity(footer.fingerprint), expected)
            )
    for split, rows in expected["rows"].items():
        shards = [footer.shard for footer in footers if footer.shard.split == split]
        counts = {shard.count for shard in shards}
        if len(counts) > 1:
            raise DamagedError(
                f"{store} mixes {split} shards of two layouts: of {sorted(counts)}; "
                "keep the files of one"
            )
        if shards and not set(shards) <= set(plan_shards(split, rows, counts.pop())):
            raise DamagedError(f"{store}: the {split} shards do not divide {rows} rows evenly")
    missing = missing_shards(expected, [footer.shard.name for footer in footers])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DamagedError(
            f"{store} is incomplete, missing {', '.join(missing[:3])}{more}: run the same "
            "teacher-dump again, it makes only what is missing"
        )


def missing_shards(fingerprint: dict[str, Any], names: list[str]) -> list[str]:
    """Names of the shards that a cache should have, given those (of one layout) that it has."""
    missing: list[str] = []
    for split, rows in fingerprint["rows"].items():
        matches = [match for match in map(SHARD_NAME.fullmatch, names) if match]
        counts = [int(match[3]) for match in matches if match[1] == split]
        planned = plan_shards(split, rows, counts[0] if counts else 1)
        missing += [shard.name for shard in planned if shard.name not in names]
    return missing


def write_manifest(store: Store, footers: list[Footer]) -> dict[str, Any]:
    """Write manifest.json: the fingerprint and one entry per shard."""
    keys = ("split", "index", "count", "first_row", "end_row")
    entries = [
        {
            "name": footer.shard.name,
            "bytes": footer.size,
            "tokens": int(footer.lengths.sum()),
            **{key: getattr(footer.shard, key) for key in keys},
        }
        for footer in footers
    ]
    manifest = {"fingerprint": footers[0].fingerprint, "shards": entries}
    store.write_text(MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def summary(store: Store, footers: list[Footer]) -> list[str]:
    """One line per split: shards, rows, tokens, bytes, bytes per token."""
    lines = []
    for split in sorted({footer.shard.split for footer in footers}):
        part = [footer for footer in footers if footer.shard.split == split]
        rows = sum(len(footer.lengths) for footer in part)
        tokens = sum(int(footer.lengths.sum()) for footer in part)
        size = sum(footer.size for footer in part)
        lines.append(
            f"{store} {split}: {len(part)} shards, {rows} rows, {tokens} tokens, {size} bytes, "
            f"{size / max(1, tokens):.1f} bytes/token"
        )
    return lines


class CacheReader:
    """Rows of one split of the cache at a path or URL, by row number.

    Fetches a row group at a time and keeps recent ones.

    `k`: at most this many ids of each position, the best ones; the rest joins the tail.
    Attributes: `fingerprint`; `lengths` int32 [rows], tokens per row; `vocab_size`.
    Raises UsageError if there is no cache or `k` is more than it holds, DamagedError if it is
    incomplete or inconsistent.
    """

    def __init__(
        self,
        location: str | Path | Store,
        split: str,
        k: int | None = None,
        keep_groups: int = 20,
    ) -> None:
        store = open_store(location)
        footers = [footer for footer in read_footers(store) if footer.shard.split == split]
        self._store = store
        self._names = [footer.shard.name for footer in footers]
        self._first_rows = np.array([footer.shard.first_row for footer in footers])
        self._k = k
        self._keep_groups = keep_groups
        self._shards: OrderedDict[int, tuple[Any, Footer]] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], codec.Group] = OrderedDict()
        self.fingerprint: dict[str, Any] = footers[0].fingerprint
        self.vocab_size: int = self.fingerprint["vocab_size"]
        self.lengths = np.concatenate([footer.lengths for footer in footers])
        kind = self.fingerprint["kind"]
        if k is not None and (kind != "topk" or k > self.fingerprint["k"]):
            stored = f"k = {self.fingerprint['k']}" if kind == "topk" else f"kind {kind}"
            raise UsageError(f"k: found {k}, but {store} holds {stored}")

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> Row:
        """The row with this number. Raises DamagedError if its bytes fail their checksum."""
        shard = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        group, offset = divmod(number - int(self._first_rows[shard]), GROUP_ROWS)
        key = (shard, group)
        with damage(self._store.path(self._names[shard])):
            if key not in self._groups:
                self._groups[key] = self._fetch(shard, group)
                if len(self._groups) > self._keep_groups:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(key)
            row = self._groups[key].row(offset)
        if self._k is not None and isinstance(row.record, TopK):
            row = Row(row.number, row.tokens, row.record.keep(self._k))
        return row

    def _fetch(self, shard: int, group: int) -> codec.Group:
        if shard not in self._shards:
            footer = read_footer(self._store, self._names[shard])
            if identity(footer.fingerprint) != identity(self.fingerprint):
                raise ValueError("it was replaced by a shard of another cache")
            self._shards[shard] = self._store.open(self._names[shard]), footer
            if len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)[1][0].close()
        self._shards.move_to_end(shard)
        file, footer = self._shards[shard]
        return codec.Group(read_group(file, footer, group), self.fingerprint["kind"])
