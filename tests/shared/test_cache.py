"""Caches: rows are found by number; what is missing, foreign, damaged or there twice is named."""

import json
import subprocess
import sys

import numpy as np
import pytest

from shared.cache import (
    MANIFEST,
    CacheReader,
    plan_shards,
    read_footers,
    summary,
    write_manifest,
)
from shared.errors import DamagedError, UnreadableError, UsageError
from shared.records import Row, TopK
from shared.shardfile import FORMAT_VERSION, GROUP_ROWS, Shard, read_footer, write_shard
from shared.store import open_store

K = 6
ROWS = 4 * GROUP_ROWS + 20
COUNT = 2  # shards of two groups, and of two groups and 20 rows
SECOND = 2 * GROUP_ROWS  # the first row of the second shard


def fingerprint(rows=ROWS, **changes):
    return {
        "format": FORMAT_VERSION,
        "kind": "topk",
        "k": K,
        "vocab_size": 50,
        "corpus": {"name": "stories", "sha256": "aa"},
        "rows": {"train": rows, "validation": 5},
        **changes,
    }


def make_rows(first, end, longest=9, k=K):
    """Rows of 1 to `longest` tokens; record values are multiples of a step, so they survive."""
    rng = np.random.default_rng(first)
    rows = []
    for number in range(first, end):
        tokens = rng.integers(0, 50, rng.integers(1, longest + 1)).astype(np.int32)
        n = len(tokens) - 1
        ids = rng.permuted(np.tile(np.arange(50, dtype=np.int32), (n, 1)), axis=1)[:, :k]
        steps = np.sort(rng.integers(0, 300, (n, k)), axis=1).astype(np.float32)
        tail, lse = rng.integers(0, 300, (2, n)).astype(np.float32) / 32
        record = TopK(ids, steps / -32, np.full(n, k, np.int32), -tail, lse)
        rows.append(Row(number, tokens, record))
    return rows


def write(folder, shard, print_=None):
    """Write one shard of random rows, and return them."""
    rows = make_rows(shard.first_row, shard.end_row)
    groups = (rows[i : i + GROUP_ROWS] for i in range(0, len(rows), GROUP_ROWS))
    write_shard(open_store(folder), shard, print_ or fingerprint(), groups)
    return rows


def write_cache(folder, count=COUNT, print_=None):
    """Write a whole cache; its train rows."""
    print_ = print_ or fingerprint()
    rows = print_["rows"]["train"]
    written = [write(folder, shard, print_) for shard in plan_shards("train", rows, count)]
    write(folder, Shard("validation", 0, 1, 0, 5), print_)
    return [row for part in written for row in part]


def assert_same(read, written):
    assert read.number == written.number
    np.testing.assert_array_equal(read.tokens, written.tokens)
    assert len(read.record.ids) == len(written.record.ids)
    if len(written.record.ids):
        for name, values in vars(written.record).items():
            np.testing.assert_array_equal(getattr(read.record, name), values, err_msg=name)


@pytest.fixture
def folder(tmp_path):
    """A whole cache of two train shards and one of validation."""
    write_cache(tmp_path)
    return tmp_path


def name(index, count=COUNT):
    return f"train-{index:05d}-of-{count:05d}.parquet"


def refused(folder, *parts):
    """Check that a reader refuses the cache with a message that contains `parts`."""
    with pytest.raises(DamagedError) as caught:
        read_footers(open_store(folder))
    with pytest.raises(DamagedError) as again:
        CacheReader(open_store(folder), "validation")
    assert again.value.message == caught.value.message
    for part in parts:
        assert part in caught.value.message


def flip(folder, shard, group):
    """Flip one bit in the middle of a row group, in place."""
    ends = [0, *(end for end, _ in read_footer(open_store(folder), shard).groups)]
    middle = (ends[group] + ends[group + 1]) // 2
    with (folder / shard).open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 8]))


# Plan


@pytest.mark.parametrize("rows", [1, 7, 64, 276, 1000, 5000])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_plan_covers_every_row_once(rows, count):
    shards = plan_shards("train", rows, min(count, rows))
    covered = [n for s in shards for n in range(s.first_row, s.end_row)]
    assert covered == list(range(rows))
    assert [s.name for s in shards] == [name(i, len(shards)) for i in range(len(shards))]
    sizes = [s.end_row - s.first_row for s in shards]
    if rows >= 2 * GROUP_ROWS * len(shards):  # whole groups, and what is left in the last shard
        assert all(s.first_row % GROUP_ROWS == 0 for s in shards)
        sizes[-1] -= rows % GROUP_ROWS
        assert max(sizes) - min(sizes) <= GROUP_ROWS
    else:
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [0, 8])
def test_plan_refuses_empty_shards(count):
    with pytest.raises(UsageError, match=f"{count} train shards for 7 rows"):
        plan_shards("train", 7, count)


# Reading


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("keep_groups", [1, 32])
def test_rows_in_any_order_are_those_written(tmp_path, count, keep_groups):
    written = write_cache(tmp_path, count)
    reader = CacheReader(open_store(tmp_path), "train", keep_groups=keep_groups)
    assert len(reader) == ROWS
    assert reader.lengths.tolist() == [len(row.tokens) for row in written]
    assert reader.fingerprint == fingerprint()
    assert reader.vocab_size == 50
    for number in np.random.default_rng(0).permutation(ROWS):
        assert_same(reader.row(int(number)), written[number])
    validation = CacheReader(open_store(tmp_path), "validation")
    assert len(validation) == 5
    assert_same(validation.row(4), make_rows(0, 5)[4])


def test_k_is_a_prefix_whose_rest_joins_the_tail(tmp_path):
    written = write_cache(tmp_path)
    for k in (1, 3, K):
        reader = CacheReader(open_store(tmp_path), "train", k=k)
        for number in (0, SECOND - 1, SECOND, ROWS - 1, 40):
            assert_same(
                reader.row(number),
                Row(number, written[number].tokens, written[number].record.keep(k)),
            )


def test_more_ids_than_the_cache_has_are_refused(folder):
    with pytest.raises(UsageError, match=f"k: found {K + 1}, but {folder} holds k = {K}"):
        CacheReader(open_store(folder), "train", k=K + 1)


def test_only_the_groups_that_are_kept_are_not_fetched_again(folder):
    readers = {keep: CacheReader(open_store(folder), "train", keep_groups=keep) for keep in (1, 2)}
    for reader in readers.values():
        reader.row(0)
    flip(folder, name(0), group=0)
    for reader in readers.values():
        reader.row(1)
        reader.row(GROUP_ROWS)
    readers[2].row(0)  # and is now the group used last
    readers[2].row(2 * GROUP_ROWS)
    readers[2].row(0)
    with pytest.raises(DamagedError, match=name(0)):
        readers[1].row(0)


def test_flipped_bit_met_in_the_middle_names_the_file(tmp_path):
    written = write_cache(tmp_path)
    flip(tmp_path, name(1), group=1)
    reader = CacheReader(open_store(tmp_path), "train")
    first = SECOND + GROUP_ROWS
    bad = range(first, first + GROUP_ROWS)
    for number in range(ROWS):
        if number in bad:
            for _ in range(2):  # nothing of it was kept
                with pytest.raises(UnreadableError, match=f"{name(1)} is damaged .*row group 1"):
                    reader.row(number)
        else:
            assert_same(reader.row(number), written[number])


def test_shard_replaced_under_a_reader_is_named(folder):
    reader = CacheReader(open_store(folder), "train")
    reader.row(0)
    other = fingerprint(corpus={"name": "stories", "sha256": "bb"})
    write(folder, Shard("train", 1, COUNT, SECOND, ROWS), other)
    with pytest.raises(DamagedError, match=f"{name(1)}.* replaced"):
        reader.row(SECOND)


def test_library_versions_may_differ_between_shards(tmp_path):
    for version, shard in enumerate(plan_shards("train", ROWS, 2)):
        write(tmp_path, shard, fingerprint(versions={"torch": str(version)}))
    write(tmp_path, Shard("validation", 0, 1, 0, 5))
    assert len(CacheReader(open_store(tmp_path), "train")) == ROWS


# What is refused


@pytest.mark.parametrize("make", [False, True])
def test_no_cache(tmp_path, make):
    if make:
        (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no cache at .*empty: make one with teacher-dump"):
        CacheReader(open_store(tmp_path / "empty"), "train")


@pytest.mark.parametrize("lost", [name(0), name(1), "validation-00000-of-00001.parquet"])
def test_missing_shard_is_named(folder, lost):
    (folder / lost).unlink()
    refused(folder, f"missing {lost}:", "run the same teacher-dump again")


def test_of_many_missing_shards_three_are_named(tmp_path):
    write_cache(tmp_path, count=9)
    for index in (1, 2, 4, 7, 8):
        (tmp_path / name(index, 9)).unlink()
    refused(tmp_path, f"missing {name(1, 9)}, {name(2, 9)}, {name(4, 9)} and 2 more:")


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_truncated_shard_is_named(folder, share):
    data = (folder / name(1)).read_bytes()
    (folder / name(1)).write_bytes(data[: int(len(data) * share)])
    refused(folder, f"{name(1)} is damaged")


def test_shard_moved_to_another_place_is_named(folder):
    (folder / name(0)).replace(folder / name(1))
    refused(folder, f"{name(1)} is the shard {name(0)} under another name")


def test_two_shards_that_changed_places_are_named(folder):
    (folder / name(0)).replace(folder / "kept")
    (folder / name(1)).replace(folder / name(0))
    (folder / "kept").replace(folder / name(1))
    refused(folder, f"{name(0)} is the shard {name(1)} under another name")


@pytest.mark.parametrize("junk", ["junk.parquet", "train-00000-of-00002 (copy).parquet"])
def test_shard_moved_or_copied_to_junk_is_named(folder, junk):
    (folder / junk).write_bytes((folder / name(0)).read_bytes())
    refused(folder, f"{junk} is not the name of a shard")
    (folder / name(0)).unlink()
    refused(folder, f"{junk} is not the name of a shard")


def test_unfinished_files_and_other_names_do_not_matter(folder):
    (folder / ".tmp-0123-train-00000-of-00002.parquet").write_bytes(b"half a shard")
    (folder / "notes.txt").write_text("mine")
    assert len(read_footers(open_store(folder))) == COUNT + 1


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"corpus": {"name": "a", "sha256": "aa"}}, "corpus.name: found 'a', expected 'stories'"),
        ({"k": 64}, f"k: found 64, expected {K}"),
        ({"vocab_size": 51}, "vocab_size: found 51, expected 50"),
        ({"teacher": {"name": "x"}}, "teacher.name: found 'x', expected None"),
    ],
)
def test_foreign_shard_is_named_with_both_values(folder, changes, difference):
    write(folder, Shard("train", 1, COUNT, SECOND, ROWS), fingerprint(**changes))
    refused(folder, f"{name(1)} was made with other settings than {name(0)}", difference)


def test_caches_that_agree_in_all_but_the_corpus_are_told_apart(tmp_path):
    """Same settings, row counts and shard names; only the documents differ."""
    here, there = tmp_path / "here", tmp_path / "there"
    write_cache(here)
    write_cache(there, print_=fingerprint(corpus={"name": "stories", "sha256": "bb"}))
    for cache in (here, there):
        assert len(CacheReader(open_store(cache), "train")) == ROWS
    validation = "validation-00000-of-00001.parquet"
    (here / validation).write_bytes((there / validation).read_bytes())
    refused(here, validation, "corpus.sha256: found 'bb', expected 'aa'")


@pytest.mark.parametrize("extra", [1, 3])
def test_two_layouts_are_refused_with_both_counts(folder, extra):
    write(folder, plan_shards("train", ROWS, extra)[0])
    refused(folder, f"mixes train shards of two layouts: of {sorted([COUNT, extra])}")


def test_shard_of_other_rows_than_its_place_has_is_named(folder):
    write(folder, Shard("train", 1, COUNT, SECOND + 1, ROWS))
    refused(folder, str(folder), f"the train shards do not divide {ROWS} rows")


# Manifest


def test_manifest_says_what_the_footers_say(folder):
    store = open_store(folder)
    manifest = write_manifest(store, read_footers(store))
    assert json.loads((folder / MANIFEST).read_text()) == manifest
    assert manifest["fingerprint"] == fingerprint()
    assert [entry["name"] for entry in manifest["shards"]] == sorted(
        path.name for path in folder.glob("*.parquet")
    )
    for entry in manifest["shards"]:
        footer = read_footer(store, entry["name"])
        assert entry == {
            "name": footer.shard.name,
            "bytes": (folder / footer.shard.name).stat().st_size,
            "tokens": footer.lengths.sum(),
            "split": footer.shard.split,
            "index": footer.shard.index,
            "count": footer.shard.count,
            "first_row": footer.shard.first_row,
            "end_row": footer.shard.end_row,
        }
    assert sum(e["tokens"] for e in manifest["shards"] if e["split"] == "train") == sum(
        len(row.tokens) for row in make_rows(0, SECOND) + make_rows(SECOND, ROWS)
    )


@pytest.mark.parametrize("content", [None, "", "{", '{"shards": []}'])
def test_reader_needs_no_manifest(folder, content):
    if content is not None:
        (folder / MANIFEST).write_text(content)
    assert len(CacheReader(open_store(folder), "train")) == ROWS


@pytest.mark.parametrize("content", [None, "{", '{"shards": []}'])
def test_dump_rebuilds_the_manifest(cache, dump_config, content):
    from teacher_dump.dump import dump

    good = (cache / MANIFEST).read_text()
    times = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.parquet")}
    (cache / MANIFEST).unlink()
    if content is not None:
        (cache / MANIFEST).write_text(content)
    dump(dump_config, cache)
    assert (cache / MANIFEST).read_text() == good
    assert {path.name: path.stat().st_mtime_ns for path in cache.glob("*.parquet")} == times


def test_summary_counts_each_split(folder):
    store = open_store(folder)
    train, validation = summary(store, read_footers(store))
    size = sum((folder / name(i)).stat().st_size for i in range(COUNT))
    tokens = sum(len(row.tokens) for row in make_rows(0, SECOND) + make_rows(SECOND, ROWS))
    assert train.startswith(
        f"{folder} train: 2 shards, {ROWS} rows, {tokens} tokens, {size} bytes, "
        f"{size / tokens:.1f} bytes/token"
    )
    assert validation.startswith(f"{folder} validation: 1 shards, 5 rows, ")


# Memory

READ_ALL = """
import sys
from shared.cache import CacheReader
from shared.store import open_store

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 10

reader = CacheReader(open_store(sys.argv[1]), "train")
for turn in range(2):
    for number in range(len(reader)):
        if number == 400 and turn == 0:
            print(used())
        assert reader.row(number).number == number
print(used())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_flat_over_a_thousand_shards(tmp_path):
    """Groups of 300 tokens with k = 16 are 40 KB in memory: 1000 of them would be 40 MB."""
    store, print_ = open_store(tmp_path), fingerprint(rows=2000, k=16)
    rng = np.random.default_rng(0)
    ids = np.tile(rng.permutation(50)[:16].astype(np.int32), (299, 1))
    logprobs = -np.sort(rng.gamma(1, 3, (299, 16)), axis=1).astype(np.float32)
    record = TopK(
        ids, logprobs, np.full(299, 16, np.int32), logprobs[:, -1], np.ones(299, np.float32)
    )
    tokens = rng.integers(0, 50, 300).astype(np.int32)
    for shard in plan_shards("train", 2000, 1000):
        rows = [Row(number, tokens, record) for number in range(shard.first_row, shard.end_row)]
        write_shard(store, shard, print_, [rows])
    write(tmp_path, Shard("validation", 0, 1, 0, 5), print_)
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    after_200, after_1000 = map(int, done.stdout.split())
    assert after_1000 - after_200 < 20 << 10, "KB"
