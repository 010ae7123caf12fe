"""One shard: a Parquet file in which no flipped bit goes unnoticed.

Parquet's page checksums do not cover page headers or the footer. So each footer holds, under the
key `stackgrow`, the CRC-32 of every row group's bytes, and the four bytes before the footer, where
no Parquet reader looks, are the CRC-32 of the footer:

    row group 0 | row group 1 | ... | CRC-32 of what follows | footer | its length | PAR1

A row group is read with one request, checked, and decoded from memory.
"""

import io
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shared import codec
from shared.errors import DamagedError, UnreadableError
from shared.records import Row
from shared.store import Store

FORMAT_VERSION = 2
GROUP_ROWS = 64  # rows of a Parquet row group: what a reader fetches at once
FOOTER_KEY = b"stackgrow"
TAIL_BYTES = 1 << 16  # first guess at how long a footer is
# zstd 1: higher levels look for repeats that are not there, and come out larger as well as slower.
ZSTD_LEVEL = 1


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


@dataclass(frozen=True)
class Footer:
    """What a shard says of itself."""

    shard: Shard
    fingerprint: dict[str, Any]  # everything that decided the contents
    lengths: np.ndarray  # int32 [rows], tokens of each row
    groups: list[tuple[int, int]]  # (end offset, CRC-32) of each row group
    size: int  # bytes of the file
    parquet: pq.FileMetaData | None  # needed to decode row groups


def identity(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The part of a fingerprint that must agree; library versions may differ between shards."""
    return {key: value for key, value in fingerprint.items() if key != "versions"}


@contextmanager
def damage(path: str) -> Iterator[None]:
    """Turn what a broken file makes the libraries raise into an UnreadableError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableError(
            f"{path} is damaged ({reason}): the same teacher-dump command makes it again"
        ) from None


# Writing


def write_shard(
    store: Store, shard: Shard, fingerprint: dict[str, Any], groups: Iterable[list[Row]]
) -> None:
    """Write `shard` from groups of GROUP_ROWS rows (the last may be less); whole or not at all."""
    with store.writing(shard.name) as temporary, temporary.open("wb") as file:
        write_parquet(file, shard, fingerprint, groups)


def write_parquet(
    file: io.BufferedIOBase,
    shard: Shard,
    fingerprint: dict[str, Any],
    groups: Iterable[list[Row]],
) -> None:
    """Write the bytes of a shard to an open file."""
    kind = fingerprint["kind"]
    sink = _Sink(file)
    lengths: list[int] = []
    ends: list[tuple[int, int]] = []
    with pq.ParquetWriter(
        sink,
        codec.schema(kind),
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=False,
        use_byte_stream_split=False,
        column_encoding=codec.encodings(kind),
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for rows in groups:
            writer.write_table(codec.encode(rows, kind), row_group_size=GROUP_ROWS)
            lengths += [len(row.tokens) for row in rows]
            ends.append((sink.tell(), sink.take_crc()))
        about = {"fingerprint": fingerprint, **asdict(shard), "lengths": lengths, "groups": ends}
        writer.add_key_value_metadata({FOOTER_KEY: json.dumps(about)})
        sink.hold = io.BytesIO()
    footer = sink.hold.getvalue()
    file.write(struct.pack("<I", zlib.crc32(footer)) + footer)


class _Sink:
    """The file that Parquet writes to: counts, checks, and in the end holds back the footer."""

    closed = False

    def __init__(self, file: io.BufferedIOBase) -> None:
        self.hold: io.BytesIO | None = None
        self._file = file
        self._at = 0
        self._crc = 0

    def write(self, data: bytes) -> int:
        if self.hold is not None:
            self.hold.write(data)
        else:
            self._file.write(data)
            self._crc = zlib.crc32(data, self._crc)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def take_crc(self) -> int:
        """CRC-32 of all bytes since the last call."""
        crc, self._crc = self._crc, 0
        return crc

    def flush(self) -> None: ...

    def close(self) -> None: ...


# Reading


def read_footer(store: Store, name: str) -> Footer:
    """The footer of a shard, checked. Raises DamagedError if `name` is no whole shard of ours."""
    path = store.path(name)
    with damage(path), store.open(name) as file:
        size = file.size()
        tail = _tail(file, size)
        whole = len(tail) >= 4 and struct.unpack("<I", tail[:4])[0] == zlib.crc32(tail[4:])
        parquet = pq.read_metadata(pa.BufferReader(b"PAR1" + tail[4:]))
        text = (parquet.metadata or {}).get(FOOTER_KEY)
    if text is None:
        raise DamagedError(f"{path} is a Parquet file, but not a shard of a cache: move it away")
    with damage(path):
        about = json.loads(text)
        fingerprint = about["fingerprint"]
        if fingerprint["format"] != FORMAT_VERSION:
            raise DamagedError(
                f"{path} has format {fingerprint['format']}, this version reads {FORMAT_VERSION}: "
                "dump to another folder"
            )
        if not whole:
            raise ValueError("the footer's checksum is wrong")
        shard = Shard(*(about[key] for key in ("split", "index", "count", "first_row", "end_row")))
        groups = [(end, crc) for end, crc in about["groups"]]
        lengths = np.array(about["lengths"], np.int32)
        if len(lengths) != shard.end_row - shard.first_row or len(lengths) != parquet.num_rows:
            raise ValueError(f"{parquet.num_rows} rows where {len(lengths)} are announced")
    if shard.name != name:
        raise DamagedError(f"{path} is the shard {shard.name} under another name: move it away")
    return Footer(shard, fingerprint, lengths, groups, size, parquet)


def _tail(file: pa.NativeFile, size: int) -> bytes:
    """The last bytes of a shard, from the CRC-32 on. Raises ValueError for a torn file."""
    if size < 12:
        raise ValueError(f"{size} bytes")
    tail = file.read_at(min(size, TAIL_BYTES), max(0, size - TAIL_BYTES))
    if tail[-4:] != b"PAR1":
        raise ValueError("it does not end as a Parquet file")
    length = struct.unpack("<I", tail[-8:-4])[0] + 12
    if length > size:
        raise ValueError("the footer is longer than the file")
    return file.read_at(length, size - length) if length > len(tail) else tail[-length:]


def read_group(file: pa.NativeFile, footer: Footer, index: int) -> pa.Table:
    """Row group `index` of an open shard, read in one piece and checked.

    Raises what `damage` catches.
    """
    start = footer.groups[index - 1][0] if index else 0
    end, crc = footer.groups[index]
    data = file.read_at(end - start, start)
    if zlib.crc32(data) != crc:
        raise ValueError(f"the checksum of row group {index} is wrong")
    piece = pa.PythonFile(_Piece(data, start, footer.size), mode="r")
    with pq.ParquetFile(piece, metadata=footer.parquet) as parquet:
        return parquet.read_row_group(index, use_threads=False)


class _Piece(io.BytesIO):
    """Bytes of a file from offset `start` on, at the offsets that they have in the file."""

    def __init__(self, data: bytes, start: int, size: int) -> None:
        super().__init__(data)
        self._start, self._size = start, size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset, whence = self._size + offset, io.SEEK_SET
        if whence == io.SEEK_SET:
            offset -= self._start
        return super().seek(offset, whence) + self._start

    def tell(self) -> int:
        return super().tell() + self._start


def check_shard(store: Store, name: str) -> Footer:
    """Read and unpack a whole shard; its footer. Raises DamagedError."""
    footer = read_footer(store, name)
    numbers: list[int] = []
    lengths: list[int] = []
    with damage(store.path(name)), store.open(name) as file:
        for index in range(len(footer.groups)):
            group = codec.Group(read_group(file, footer, index), footer.fingerprint["kind"])
            rows = [group.row(i) for i in range(len(group))]
            numbers += [row.number for row in rows]
            lengths += [len(row.tokens) for row in rows]
        if numbers != list(range(footer.shard.first_row, footer.shard.end_row)):
            raise ValueError("its row numbers are not those of its footer")
        if not np.array_equal(lengths, footer.lengths):
            raise ValueError("its rows are not as long as its footer says")
    return footer
