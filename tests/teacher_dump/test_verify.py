"""`teacher-dump verify`: a table that names every fault, and records against the teacher."""

import dataclasses
import shutil

import numpy as np
import pytest

from shared.cache import CacheReader
from shared.errors import DamagedError, UsageError
from shared.shardfile import GROUP_ROWS, read_footer, write_shard
from shared.store import open_store
from teacher_dump.dump import dump
from teacher_dump.verify import verify_cache, verify_deep

FIRST, SECOND = (f"train-0000{i}-of-00002.parquet" for i in range(2))


def lines(capsys):
    """Last words of each line of the table, by its first word."""
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


def test_every_shard_has_a_line(cache, capsys):
    verify_cache(open_store(cache))
    table = lines(capsys)
    assert [name for name, line in table.items() if line.endswith(" ok")] == [
        FIRST,
        SECOND,
        "validation-00000-of-00001.parquet",
        "teacher/",
    ]


def test_every_fault_is_named_at_once(cache, capsys):
    data = bytearray((cache / FIRST).read_bytes())
    data[len(data) // 2] ^= 16
    (cache / FIRST).write_bytes(data)
    (cache / "copy.parquet").write_bytes((cache / SECOND).read_bytes())
    (cache / SECOND).unlink()
    with pytest.raises(DamagedError, match="3 of its shards"):
        verify_cache(open_store(cache))
    table = lines(capsys)
    assert "checksum of row group" in table[FIRST]
    assert table[SECOND].endswith("missing")
    assert "under another name" in table["copy.parquet"]
    assert table["validation-00000-of-00001.parquet"].endswith(" ok")


def test_a_whole_split_or_a_sidecar_file_is_missed(cache, capsys):
    validation = cache / "validation-00000-of-00001.parquet"
    validation.rename(cache / "kept")
    with pytest.raises(DamagedError):
        verify_cache(open_store(cache))
    assert lines(capsys)[validation.name].endswith("missing")
    (cache / "kept").rename(validation)
    weights = bytearray((cache / "teacher" / "teacher.safetensors").read_bytes())
    weights[-1] ^= 1
    (cache / "teacher" / "teacher.safetensors").write_bytes(weights)
    with pytest.raises(DamagedError, match="teacher.safetensors is damaged"):
        verify_cache(open_store(cache))
    shutil.rmtree(cache / "teacher")
    with pytest.raises(DamagedError, match="files.json is missing"):
        verify_cache(open_store(cache))


def test_no_cache_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no cache at"):
        verify_cache(open_store(tmp_path / "none"))


@pytest.mark.parametrize("change", [{}, {"min_prob": 0.02}, {"kind": "sample", "samples": 20}])
def test_deep_agrees_with_the_teacher_that_made_it(dump_config, tmp_path, change):
    dump(dataclasses.replace(dump_config, **change), tmp_path / "cache")
    line = verify_deep(open_store(tmp_path / "cache"), dump_config.teacher, 5)
    assert line.startswith("10 rows computed again")


@pytest.mark.parametrize("kind", ["topk", "sample"])
def test_deep_finds_records_of_other_logits(dump_config, tmp_path, kind):
    """The shards verify, but their records were shifted by one position."""
    dump(dataclasses.replace(dump_config, kind=kind), tmp_path / "cache")
    store = open_store(tmp_path / "cache")
    reader = CacheReader(store, "train")
    for name in (FIRST, SECOND):
        footer = read_footer(store, name)
        rows = []
        for number in range(footer.shard.first_row, footer.shard.end_row):
            row = reader.row(number)
            fields = {
                f.name: np.roll(getattr(row.record, f.name), 1, 0)
                for f in dataclasses.fields(row.record)
            }
            rows.append(dataclasses.replace(row, record=type(row.record)(**fields)))
        groups = [rows[i : i + GROUP_ROWS] for i in range(0, len(rows), GROUP_ROWS)]
        write_shard(store, footer.shard, footer.fingerprint, groups)
    verify_cache(store)
    with pytest.raises(DamagedError, match="not this teacher's"):
        verify_deep(store, dump_config.teacher, 8)


def test_deep_refuses_another_teacher_and_tokens(dump_config, cache, make_teacher, tmp_path):
    other = make_teacher(tmp_path / "teacher", seed=1)
    with pytest.raises(UsageError, match="weights_sha256: found"):
        verify_deep(open_store(cache), str(other), 4)
    with pytest.raises(UsageError, match="give --teacher"):
        verify_deep(open_store(cache), None, 4)
    dump(dataclasses.replace(dump_config, kind="tokens"), tmp_path / "tokens")
    with pytest.raises(UsageError, match="tokens alone"):
        verify_deep(open_store(tmp_path / "tokens"), dump_config.teacher, 4)
