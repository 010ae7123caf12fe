"""One shard: it is read as written, and whatever is wrong with it is found and named."""

import os
import random
import shutil
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.codec import Group
from shared.errors import DamagedError, UnreadableError
from shared.records import Row, Sample, TopK
from shared.shardfile import (
    FOOTER_KEY,
    FORMAT_VERSION,
    GROUP_ROWS,
    Shard,
    check_shard,
    read_footer,
    read_group,
    write_shard,
)
from shared.store import open_store

ROWS = 2 * GROUP_ROWS + 22


def fingerprint(**changes):
    return {"format": FORMAT_VERSION, "kind": "topk", "k": 4, "vocab_size": 50, **changes}


def make_rows(first, end, kind="topk"):
    """Rows of 1 to 12 random tokens; record values are multiples of a step, so they survive."""
    rng = np.random.default_rng(first)
    rows = []
    for number in range(first, end):
        tokens = rng.integers(0, 50, rng.integers(1, 13)).astype(np.int32)
        n = len(tokens) - 1
        ids = rng.permuted(np.tile(np.arange(50, dtype=np.int32), (n, 1)), axis=1)[:, :4]
        record = None
        if kind == "topk":
            steps = np.sort(rng.integers(0, 300, (n, 4)), axis=1).astype(np.float32)
            tail, lse = rng.integers(0, 300, (2, n)).astype(np.float32) / 32
            record = TopK(ids, steps / -32, np.full(n, 4, np.int32), -tail, lse)
        elif kind == "sample":
            record = Sample(ids, rng.multinomial(16, [0.25] * 4, n).astype(np.int32) + 1)
        rows.append(Row(number, tokens, record))
    return rows


def in_groups(rows):
    return (rows[i : i + GROUP_ROWS] for i in range(0, len(rows), GROUP_ROWS))


def write(folder, shard, print_=None):
    """Write a shard of random rows; the rows and the file."""
    print_ = print_ or fingerprint()
    rows = make_rows(shard.first_row, shard.end_row, print_["kind"])
    write_shard(open_store(folder), shard, print_, in_groups(rows))
    return rows, folder / shard.name


@pytest.fixture
def shard(tmp_path):
    """A whole shard of three row groups."""
    return write(tmp_path, Shard("train", 0, 1, 0, ROWS))[1]


def check(path):
    return check_shard(open_store(path.parent), path.name)


def footer_start(data):
    """Where the footer's checksum is."""
    return len(data) - 12 - struct.unpack("<I", data[-8:-4])[0]


def silent(path, good, bits):
    """Those of `bits`, as (byte, bit), that can be flipped without check_shard naming the file."""
    unnoticed = []
    with path.open("r+b") as file:
        for byte, bit in bits:
            file.seek(byte)
            file.write(bytes([good[byte] ^ 1 << bit]))
            file.flush()
            message = ""
            try:
                check(path)
            except DamagedError as error:
                message = error.message
            if path.name not in message:
                unnoticed.append((byte, bit))
            file.seek(byte)
            file.write(good[byte : byte + 1])
    assert path.read_bytes() == good
    return unnoticed


# Whole shards


@pytest.mark.parametrize("kind", ["topk", "sample", "tokens"])
@pytest.mark.parametrize("rows", [1, GROUP_ROWS, GROUP_ROWS + 1, ROWS])
def test_a_shard_is_read_as_written(tmp_path, kind, rows):
    shard, print_ = Shard("validation", 3, 5, 1000, 1000 + rows), fingerprint(kind=kind)
    written, path = write(tmp_path, shard, print_)
    store = open_store(tmp_path)
    footer = read_footer(store, "validation-00003-of-00005.parquet")
    assert footer.shard == shard
    assert footer.fingerprint == print_
    assert footer.size == path.stat().st_size
    assert footer.lengths.tolist() == [len(row.tokens) for row in written]
    assert len(footer.groups) == -(-rows // GROUP_ROWS)
    assert check(path).groups == footer.groups
    with store.open(path.name) as file:
        groups = [
            Group(read_group(file, footer, i), kind) for i in reversed(range(len(footer.groups)))
        ]
    read = [group.row(i) for group in reversed(groups) for i in range(len(group))]
    for a, b in zip(read, written, strict=True):
        assert a.number == b.number
        np.testing.assert_array_equal(a.tokens, b.tokens)
        if kind == "topk" and len(b.tokens) > 1:
            for name, values in vars(b.record).items():
                np.testing.assert_array_equal(getattr(a.record, name), values)
        if kind == "sample":
            for order, there, here in zip(
                np.argsort(b.record.ids), b.record.ids, a.record.ids, strict=True
            ):
                np.testing.assert_array_equal(np.sort(here), there[order])


def test_the_same_rows_are_the_same_bytes(tmp_path):
    paths = [write(tmp_path / name, Shard("train", 0, 1, 0, ROWS))[1] for name in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [p.name for p in paths[0].parent.iterdir()] == [paths[0].name]


class CountedFile:
    """A file that remembers what was read of it, as (offset, bytes)."""

    closed = False

    def __init__(self, path):
        self._file = path.open("rb")
        self.reads = []

    def read(self, count=-1):
        self.reads.append((self._file.tell(), count))
        return self._file.read(count)

    def seek(self, offset, whence=0):
        return self._file.seek(offset, whence)

    def tell(self):
        return self._file.tell()

    def close(self):
        self.closed = True
        self._file.close()


def test_a_row_group_is_read_with_one_request_for_its_bytes(tmp_path):
    rows, path = write(tmp_path, Shard("train", 0, 1, 0, 6 * GROUP_ROWS))
    footer = read_footer(open_store(tmp_path), path.name)
    counted = CountedFile(path)
    with pa.PythonFile(counted, mode="r") as file:
        group = Group(read_group(file, footer, 3), "topk")
    start, end = footer.groups[2][0], footer.groups[3][0]
    assert counted.reads == [(start, end - start)]
    assert 0 < end - start < footer.size / 5
    assert group.row(5).number == 3 * GROUP_ROWS + 5
    np.testing.assert_array_equal(group.row(5).tokens, rows[3 * GROUP_ROWS + 5].tokens)


# Damage


def test_random_flipped_bits_are_all_found(shard):
    check(shard)
    seed = int.from_bytes(os.urandom(4))
    rng, good = random.Random(seed), shard.read_bytes()
    bits = [divmod(rng.randrange(8 * len(good)), 8) for _ in range(200)]
    assert silent(shard, good, bits) == [], f"seed {seed}"


def test_every_flipped_bit_of_the_footer_is_found(shard):
    """Its checksum, its contents, its length and the last magic bytes."""
    good = shard.read_bytes()
    start = footer_start(good)
    assert good[start + 4 :].count(FOOTER_KEY) == 1
    bits = [(byte, bit) for byte in range(start, len(good)) for bit in range(8)]
    assert silent(shard, good, bits) == []


def test_flipped_bits_of_every_byte_around_the_pages_are_found(shard):
    """Page headers and the first magic bytes, which Parquet's own checksums leave out."""
    good = shard.read_bytes()
    group = pq.read_metadata(shard).row_group(1)
    starts = [0, *(group.column(i).data_page_offset for i in range(group.num_columns))]
    bits = [(start + i, i % 8) for start in starts for i in range(40)]
    assert silent(shard, good, bits) == []


@pytest.mark.parametrize("cut", ["start", "magic", "group", "footer", "last byte", "half"])
def test_a_truncated_shard_is_named(shard, cut):
    good = shard.read_bytes()
    keep = {
        "start": 3,
        "magic": 12,
        "group": read_footer(open_store(shard.parent), shard.name).groups[0][0],
        "footer": footer_start(good),
        "last byte": len(good) - 1,
        "half": len(good) // 2,
    }[cut]
    shard.write_bytes(good[:keep])
    with pytest.raises(UnreadableError, match=f"{shard.name} is damaged"):
        check(shard)


def test_an_empty_file_is_named(shard):
    shard.write_bytes(b"")
    with pytest.raises(UnreadableError, match=f"{shard.name} is damaged .*0 bytes"):
        check(shard)


def test_a_missing_shard_is_named(shard):
    shard.unlink()
    with pytest.raises(DamagedError, match=shard.name):
        check(shard)


def test_another_programs_parquet_file_is_named(shard):
    pq.write_table(pa.table({"text": ["x"]}), shard)
    with pytest.raises(DamagedError, match=f"{shard.name} is a Parquet file, but not a shard"):
        check(shard)


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_is_named_with_both_versions(tmp_path, version):
    path = write(tmp_path, Shard("train", 0, 1, 0, 3), fingerprint(format=version))[1]
    with pytest.raises(DamagedError, match=f"format {version}.* reads {FORMAT_VERSION}") as caught:
        check(path)
    assert path.name in caught.value.message
    assert not isinstance(caught.value, UnreadableError)  # not to be overwritten


def test_a_shard_of_the_first_format_is_refused_for_its_format(shard):
    """It had no checksum before its footer."""
    about = b'{"fingerprint": {"format": 1}}'
    pq.write_table(pa.table({"row": [0]}).replace_schema_metadata({FOOTER_KEY: about}), shard)
    with pytest.raises(DamagedError, match=f"{shard.name} has format 1") as caught:
        check(shard)
    assert not isinstance(caught.value, UnreadableError)


@pytest.mark.parametrize("name", ["train-00001-of-00002.parquet", "validation-00000.parquet"])
def test_a_shard_under_another_name_is_named_with_both_names(shard, name):
    shutil.copy(shard, shard.with_name(name))
    with pytest.raises(DamagedError, match=f"{name} is the shard {shard.name}"):
        check(shard.with_name(name))
    check(shard)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"first_row": 1, "end_row": 4}, "row numbers"),
        ({"first_row": 0, "end_row": 4}, "3 rows where|rows where 3"),
    ],
)
def test_rows_other_than_the_footer_promises_are_found(tmp_path, wrong, reason):
    shard = Shard("train", 0, 1, **wrong)
    write_shard(open_store(tmp_path), shard, fingerprint(), in_groups(make_rows(0, 3)))
    with pytest.raises(UnreadableError, match=reason):
        check(tmp_path / shard.name)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def groups():
        yield make_rows(0, GROUP_ROWS)
        assert [p.name[:5] for p in tmp_path.iterdir()] == [".tmp-"]
        raise RuntimeError("the teacher died")

    with pytest.raises(RuntimeError, match="the teacher died"):
        write_shard(open_store(tmp_path), Shard("train", 0, 1, 0, 100), fingerprint(), groups())
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_keeps_the_shard_before_it(shard):
    def groups():
        yield make_rows(0, GROUP_ROWS)
        raise RuntimeError("the teacher died")

    good = shard.read_bytes()
    with pytest.raises(RuntimeError, match="the teacher died"):
        write_shard(
            open_store(shard.parent), Shard("train", 0, 1, 0, ROWS), fingerprint(), groups()
        )
    assert shard.read_bytes() == good
