"""Files appear whole or not at all; digests; differences of fingerprints."""

import os
import time

import pytest

from shared.errors import differences
from shared.files import atomic_write_text, remove_stale, replacing, sha256_files


def test_failure_keeps_the_old_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "new" / "file"
    atomic_write_text(path, "old")

    def write():
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write()
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    atomic_write_text(path, "new")
    assert path.read_text() == "new"


def test_only_what_a_killed_writer_left_long_ago_is_removed(tmp_path):
    day = 86400
    ages = {".tmp-old-x": 2 * day, ".tmp-new-x": day / 2, "shard.parquet": 2 * day}
    for name, age in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-new-x", "shard.parquet"]


def test_digest_covers_names_and_contents_not_folders(tmp_path):
    digests = []
    for folder, name, text in (("a", "x", "1"), ("b", "x", "1"), ("c", "y", "1"), ("d", "x", "2")):
        atomic_write_text(tmp_path / folder / name, text)
        digests.append(sha256_files([tmp_path / folder / name]))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_differences_name_nested_keys():
    found = {"a": 1, "b": {"c": 2, "d": 3}}
    expected = {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}
    assert differences(found, expected) == (
        "  b.c: found 2, expected 4\n  e: found None, expected 5"
    )
