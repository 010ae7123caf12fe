"""Shards and caches: what is written is read, and what is damaged, missing or foreign is named."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from shared.cache import (
    FORMAT_VERSION,
    GROUP_ROWS,
    CacheReader,
    Shard,
    check_shard,
    plan_shards,
    read_footer,
    shard_paths,
    write_manifest,
    write_shard,
)
from shared.errors import DamagedError, UsageError
from shared.records import Row, TopK

K = 4


def fingerprint(**changes):
    return {"format": FORMAT_VERSION, "kind": "topk", "k": K, "vocab_size": 50, **changes}


def make_rows(first, end, kind="topk"):
    rng = np.random.default_rng(first)
    rows = []
    for number in range(first, end):
        tokens = rng.integers(0, 50, rng.integers(1, 9)).astype(np.int32)
        n = len(tokens) - 1
        record = TopK(
            rng.integers(0, 50, (n, K)).astype(np.int32),
            -np.sort(rng.gamma(1.0, 3.0, (n, K)).astype(np.float32), axis=-1),
            rng.normal(size=n).astype(np.float32),
            rng.normal(size=n).astype(np.float32),
        )
        rows.append(Row(number, tokens, record if kind == "topk" else None))
    return rows


def write(folder, shard, print_=None):
    print_ = print_ or fingerprint()
    rows = make_rows(shard.first_row, shard.end_row, print_["kind"])
    groups = (rows[i : i + GROUP_ROWS] for i in range(0, len(rows), GROUP_ROWS))
    write_shard(folder, shard, print_, groups)
    return rows


def write_cache(folder, rows=150, count=2):
    written = [write(folder, shard) for shard in plan_shards("train", rows, count)]
    write(folder, Shard("validation", 0, 1, 0, 5))
    return [row for part in written for row in part]


def assert_same(read, written):
    assert read.number == written.number
    np.testing.assert_array_equal(read.tokens, written.tokens)
    if written.record is None:
        assert read.record is None
        return
    np.testing.assert_array_equal(read.record.ids, written.record.ids)
    # float16 keeps 11 bits
    np.testing.assert_allclose(read.record.logprobs, written.record.logprobs, rtol=2**-11)
    np.testing.assert_array_equal(read.record.tail_logprob, written.record.tail_logprob)
    np.testing.assert_array_equal(read.record.logsumexp, written.record.logsumexp)
    assert read.record.logprobs.dtype == np.float32
    assert read.record.ids.shape == (len(read.tokens) - 1, K)


@pytest.mark.parametrize("rows", [1, GROUP_ROWS, GROUP_ROWS + 1, 2 * GROUP_ROWS + 22])
@pytest.mark.parametrize("kind", ["topk", "tokens"])
def test_rows_survive_at_every_group_boundary(tmp_path, rows, kind):
    k = K if kind == "topk" else 0
    written = write(tmp_path, Shard("train", 0, 1, 0, rows), fingerprint(kind=kind, k=k))
    reader = CacheReader(tmp_path, "train", keep_groups=1)
    assert len(reader) == rows
    assert reader.lengths.tolist() == [len(row.tokens) for row in written]
    for number in np.random.default_rng(0).permutation(rows):
        assert_same(reader.row(number), written[number])


def test_rows_are_found_across_shards(tmp_path):
    written = write_cache(tmp_path, rows=150, count=4)
    reader = CacheReader(tmp_path, "train", keep_groups=2)
    for number in (0, 36, 37, 38, 74, 75, 149, 112, 0):
        assert_same(reader.row(number), written[number])
    assert len(CacheReader(tmp_path, "validation")) == 5


def test_kept_groups_are_bounded(tmp_path):
    write_cache(tmp_path, rows=400, count=1)
    reader = CacheReader(tmp_path, "train", keep_groups=3)
    for number in range(0, 400, 10):
        reader.row(number)
        assert len(reader._groups) <= 3


def test_plan_covers_every_row_once():
    for rows in (1, 7, 64, 1000):
        for count in (1, 3, 7):
            if count > rows:
                continue
            shards = plan_shards("train", rows, count)
            covered = [n for s in shards for n in range(s.first_row, s.end_row)]
            assert covered == list(range(rows))
            sizes = {s.end_row - s.first_row for s in shards}
            assert max(sizes) - min(sizes) <= 1
    with pytest.raises(UsageError, match="8 train shards for 7 rows"):
        plan_shards("train", 7, 8)


def damaged(path):
    try:
        check_shard(path)
    except DamagedError:
        return True
    return False


def test_every_flipped_bit_that_changes_the_contents_is_found(tmp_path):
    shard = Shard("train", 0, 1, 0, 20)
    write(tmp_path, shard)
    path = tmp_path / shard.name
    good, table = path.read_bytes(), pq.read_table(path)
    check_shard(path)
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    # Page headers (about 40 bytes, with statistics) are outside Parquet's checksums: try the
    # bits about the number of values, and one bit of some bytes of the pages themselves.
    starts = [column.data_page_offset for column in columns]
    flips = {(start + i, bit) for start in starts for i in range(10, 22) for bit in range(8)}
    end = columns[-1].data_page_offset + columns[-1].total_compressed_size
    flips |= {(position, position % 8) for position in range(4, end, 11)}
    found = 0
    for position, bit in sorted(flips):
        bad = bytearray(good)
        bad[position] ^= 1 << bit
        path.write_bytes(bad)
        unchanged = not damaged(path)
        found += not unchanged
        assert not unchanged or pq.read_table(path).equals(table), (position, bit)
    assert found > 400


def test_reader_names_the_file_with_a_flipped_byte(tmp_path):
    write_cache(tmp_path)
    write_manifest(tmp_path)
    path = shard_paths(tmp_path)[1]
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(3)  # ids
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 4
    path.write_bytes(data)
    reader = CacheReader(tmp_path, "train")
    reader.row(0)  # another shard
    with pytest.raises(DamagedError, match=path.name):
        reader.row(80)


def test_reader_verifies_the_lengths_it_reads_first(tmp_path):
    write_cache(tmp_path)
    write_manifest(tmp_path)
    path = shard_paths(tmp_path)[1]
    good, lengths = path.read_bytes(), CacheReader(tmp_path, "train").lengths
    column = pq.read_metadata(path).row_group(0).column(1)
    assert column.path_in_schema == "length"
    found = 0
    end = column.data_page_offset + column.total_compressed_size
    for position in range(end - 40, end):
        bad = bytearray(good)
        bad[position] ^= 1
        path.write_bytes(bad)
        try:
            read = CacheReader(tmp_path, "train").lengths
        except DamagedError:
            found += 1
        else:
            np.testing.assert_array_equal(read, lengths)
    assert found > 20


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_truncated_shards_are_named(tmp_path, keep):
    write_cache(tmp_path)
    path = shard_paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:keep])
    for read in (lambda: check_shard(path), lambda: write_manifest(tmp_path)):
        with pytest.raises(DamagedError, match=f"{path.name} is damaged"):
            read()


def test_missing_shards_are_named(tmp_path):
    write_cache(tmp_path, rows=150, count=3)
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    for read in (lambda: write_manifest(tmp_path), lambda: CacheReader(tmp_path, "train")):
        with pytest.raises(DamagedError, match="missing train-00001-of-00003"):
            read()


def test_shard_that_vanishes_after_the_manifest_is_named(tmp_path):
    write_cache(tmp_path)
    write_manifest(tmp_path)
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DamagedError, match="train-00001-of-00002.parquet is missing"):
        CacheReader(tmp_path, "train")


def test_foreign_shard_is_named_with_both_values(tmp_path):
    write_cache(tmp_path)
    write_manifest(tmp_path)
    write(tmp_path, Shard("train", 1, 2, 75, 150), fingerprint(vocab_size=51))
    for read in (lambda: write_manifest(tmp_path), lambda: CacheReader(tmp_path, "train")):
        with pytest.raises(DamagedError, match="train-0000") as caught:
            read()
        assert "vocab_size" in caught.value.message
        assert "50" in caught.value.message
        assert "51" in caught.value.message


def test_library_versions_may_differ_between_shards(tmp_path):
    write(tmp_path, Shard("train", 0, 2, 0, 3), fingerprint(versions={"torch": "1"}))
    write(tmp_path, Shard("train", 1, 2, 3, 5), fingerprint(versions={"torch": "2"}))
    assert len(CacheReader(tmp_path, "train")) == 5


def test_two_layouts_are_refused(tmp_path):
    write_cache(tmp_path, rows=150, count=2)
    write(tmp_path, Shard("train", 0, 3, 0, 50))
    with pytest.raises(DamagedError, match=r"two layouts.*\[2, 3\]"):
        write_manifest(tmp_path)


def test_renamed_shard_is_refused(tmp_path):
    write_cache(tmp_path, rows=150, count=2)
    data = (tmp_path / "train-00000-of-00002.parquet").read_bytes()
    (tmp_path / "train-00001-of-00002.parquet").write_bytes(data)
    with pytest.raises(DamagedError, match="train-00001-of-00002"):
        write_manifest(tmp_path)


def test_other_parquet_files_and_formats_are_refused(tmp_path):
    import pyarrow as pa

    path = tmp_path / "train-00000-of-00001.parquet"
    pq.write_table(pa.table({"text": ["x"]}), path)
    with pytest.raises(DamagedError, match="not a shard of a cache"):
        read_footer(path)
    write(tmp_path, Shard("train", 0, 1, 0, 3), fingerprint(format=99))
    with pytest.raises(DamagedError, match="format 99"):
        read_footer(path)


def test_manifest_is_rebuilt_from_the_footers(tmp_path):
    write_cache(tmp_path)
    manifest = write_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    CacheReader(tmp_path, "train")
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def groups():
        yield make_rows(0, GROUP_ROWS)
        raise RuntimeError("the teacher died")

    with pytest.raises(RuntimeError, match="the teacher died"):
        write_shard(tmp_path, Shard("train", 0, 1, 0, 100), fingerprint(), groups())
    assert list(tmp_path.iterdir()) == []


def test_no_cache_and_empty_cache(tmp_path):
    with pytest.raises(UsageError, match="no cache at"):
        CacheReader(tmp_path / "absent", "train")
    with pytest.raises(DamagedError, match="holds no shards"):
        CacheReader(tmp_path, "train")
