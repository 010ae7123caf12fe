"""Dumps: what a cache holds, restarts, several workers, and folders that are refused."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.cache import CacheReader, check_shard, read_footer, shard_paths
from shared.errors import DamagedError, UsageError
from teacher_dump.corpus import load_documents, plan_rows, token_rows
from teacher_dump.dump import dump, verify_cache
from teacher_dump.teacher import load_teacher, load_tokenizer, records

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "validation")


def arguments(config, out):
    """The command line of `config`."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if v is not None}
    options = [x for k, v in values.items() for x in ("--" + k.replace("_", "-"), str(v))]
    return [sys.executable, "-m", "teacher_dump", "--preset", "tiny", *options, "--out", str(out)]


def start(command, **env):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)


def assert_same_contents(folder, expected):
    for split in SPLITS:
        left, right = CacheReader(folder, split), CacheReader(expected, split)
        assert len(left) == len(right)
        for number in range(len(right)):
            a, b = left.row(number), right.row(number)
            assert a.number == b.number == number
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.record.logprobs, b.record.logprobs, rtol=2e-3, atol=1e-4)
            np.testing.assert_allclose(a.record.tail_logprob, b.record.tail_logprob, atol=1e-4)
            np.testing.assert_allclose(a.record.logsumexp, b.record.logsumexp, atol=1e-4)


def test_cache_holds_the_plans_rows_and_the_teachers_records(dump_config, cache_dir):
    config = dump_config
    documents = load_documents(config.data, None, "text")
    plan = plan_rows(documents, config.validation_fraction, None, None)
    tokenizer = load_tokenizer(Path(config.teacher))
    teacher = load_teacher(Path(config.teacher), "float32")
    for split in SPLITS:
        numbers = getattr(plan, split)
        reader = CacheReader(cache_dir, split)
        assert len(reader) == len(numbers)
        rows = token_rows(tokenizer, [documents[int(n)] for n in numbers], config.max_length)
        for number in range(0, len(rows), 7):
            row = reader.row(number)
            assert row.number == number
            np.testing.assert_array_equal(row.tokens, rows[number])
            (record,) = records(teacher, [rows[number]], config.k, 1000)
            np.testing.assert_allclose(row.record.logprobs, record.logprobs, rtol=2e-3, atol=1e-4)
            np.testing.assert_allclose(row.record.logsumexp, record.logsumexp, atol=1e-4)
    assert max(reader.lengths) <= config.max_length


def test_the_folder_holds_shards_manifest_and_sidecar_only(cache_dir):
    names = sorted(path.name for path in cache_dir.iterdir())
    assert names == [
        "manifest.json",
        "teacher",
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
        "validation-00000-of-00001.parquet",
    ]


def test_fingerprint_says_what_made_the_cache_and_no_path(cache_dir, dump_config):
    fingerprint = read_footer(shard_paths(cache_dir)[0])["fingerprint"]
    assert fingerprint["teacher"]["name"] == "teacher"
    assert fingerprint["corpus"]["name"] == "documents.jsonl"
    assert fingerprint["corpus"]["documents"] == 240
    assert sum(fingerprint["rows"].values()) == 240
    assert (fingerprint["k"], fingerprint["vocab_size"]) == (8, 320)
    assert "/" not in json.dumps(fingerprint)


def test_sidecar_gives_the_teachers_logits_without_the_teacher(cache_dir, dump_config):
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    side = load_file(cache_dir / "teacher" / "teacher.safetensors")
    assert {n: tuple(t.shape) for n, t in side.items()} == {
        "embed_tokens.weight": (320, 32),
        "lm_head.weight": (320, 32),
        "norm.weight": (32,),
    }
    model = load_teacher(Path(dump_config.teacher), "float32").model
    torch.testing.assert_close(side["lm_head.weight"], model.lm_head.weight, rtol=0, atol=0)
    torch.testing.assert_close(
        side["embed_tokens.weight"], model.model.embed_tokens.weight, rtol=0, atol=0
    )
    assert AutoConfig.from_pretrained(cache_dir / "teacher").hidden_size == 32
    assert AutoTokenizer.from_pretrained(cache_dir / "teacher").eos_token_id == 0


def test_restart_keeps_finished_shards_and_makes_only_the_missing(dump_config, cache, cache_dir):
    before = {path: path.stat().st_mtime_ns for path in shard_paths(cache)}
    lost = cache / "train-00001-of-00002.parquet"
    lost.unlink()
    (cache / "manifest.json").unlink()
    dump(dump_config, cache)
    after = {path: path.stat().st_mtime_ns for path in shard_paths(cache)}
    assert after.keys() == before.keys()
    assert {path for path in before if before[path] != after[path]} == {lost}
    assert_same_contents(cache, cache_dir)


def test_restart_without_anything_to_do_needs_no_model(dump_config, cache, monkeypatch):
    monkeypatch.setattr("teacher_dump.teacher.load_teacher", None)
    before = {path: path.stat().st_mtime_ns for path in shard_paths(cache)}
    dump(dump_config, cache)
    assert before == {path: path.stat().st_mtime_ns for path in shard_paths(cache)}


@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_damaged_shard_is_named_and_made_again(dump_config, cache, cache_dir, capsys, keep):
    path = cache / "train-00001-of-00002.parquet"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    dump(dump_config, cache)
    assert "making train-00001-of-00002.parquet again" in capsys.readouterr().err
    assert_same_contents(cache, cache_dir)


def test_kill_leaves_no_half_shard_and_the_same_command_completes(dump_config, cache_dir, tmp_path):
    out = tmp_path / "cache"
    slow = dataclasses.replace(dump_config, batch_tokens=1, head_positions=8)
    process = start(arguments(slow, out))
    deadline = time.monotonic() + 60
    while not list(out.glob(".tmp-*-train-00000*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = shard_paths(out)
    assert [path.name for path in done] == ["validation-00000-of-00001.parquet"]
    check_shard(done[0])
    assert list(out.glob(".tmp-*"))
    assert not (out / "manifest.json").exists()
    with pytest.raises(DamagedError, match="incomplete|missing"):
        CacheReader(out, "train")

    finisher = start(arguments(slow, out))
    stdout, stderr = finisher.communicate()
    assert finisher.returncode == 0, stderr
    assert "train: 2 shards" in stdout
    assert_same_contents(out, cache_dir)


def test_two_workers_cover_each_shard_once(dump_config, cache_dir, tmp_path):
    out = tmp_path / "cache"
    command = [*arguments(dump_config, out), "--local_rank=0"]
    workers = [start(command, RANK=str(i), WORLD_SIZE="2", LOCAL_RANK=str(i)) for i in range(2)]
    output = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], output
    assert "made 2 of its 2 shards" in output[0][1]
    assert_same_contents(out, cache_dir)
    verify_cache(out, deep=True)


def test_one_worker_of_an_array_makes_its_part(dump_config, tmp_path, monkeypatch):
    for name, value in (("MIN", 3), ("ID", 4), ("COUNT", 2)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    config = dataclasses.replace(dump_config, shards=4, max_rows=8)
    dump(config, tmp_path / "cache")
    names = [path.name for path in shard_paths(tmp_path / "cache")]
    assert names == ["train-00000-of-00004.parquet", "train-00002-of-00004.parquet"]
    assert not (tmp_path / "cache" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["WINDOW_GROUPS", "WINDOW_TOKENS"])
def test_shards_do_not_depend_on_batch_sizes(dump_config, cache_dir, tmp_path, monkeypatch, name):
    monkeypatch.setattr(f"teacher_dump.dump.{name}", 1)  # several windows a shard
    config = dataclasses.replace(dump_config, batch_tokens=150, head_positions=11)
    dump(config, tmp_path / "cache")
    assert_same_contents(tmp_path / "cache", cache_dir)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"k": 4}, "k: found 8, expected 4"),
        ({"max_length": 32}, "max_length: found 48, expected 32"),
        ({"max_rows": 100}, "rows.train"),
        ({"validation_fraction": 0.2}, "corpus.validation_fraction"),
        ({"kind": "tokens"}, "kind: found 'topk', expected 'tokens'"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_a_cache_of_other_settings_is_refused_untouched(dump_config, cache, change, key):
    refused(dataclasses.replace(dump_config, **change), cache, key)


def refused(config, folder, message):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    with pytest.raises(DamagedError) as caught:
        dump(config, folder)
    assert message in caught.value.message
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    return caught.value.message


def test_another_teacher_is_refused_with_both_hashes(dump_config, cache, make_teacher, tmp_path):
    other = make_teacher(tmp_path / "teacher", seed=1)
    message = refused(
        dataclasses.replace(dump_config, teacher=str(other)), cache, "teacher.weights_sha256: found"
    )
    assert "config_sha256" not in message
    # nothing but a sidecar: the dump was killed before its first shard
    for path in shard_paths(cache):
        path.unlink()
    refused(dataclasses.replace(dump_config, teacher=str(other)), cache, "belongs to another cache")


def test_another_tokenizer_is_refused_with_both_hashes(dump_config, cache, tmp_path):
    from teacher_dump.train_tokenizer import train_tokenizer

    train_tokenizer(dump_config.data, None, "text", 0.5, 290, tmp_path / "other")
    config = dataclasses.replace(dump_config, tokenizer=str(tmp_path / "other"))
    refused(config, cache, "tokenizer_sha256: found")


def test_the_same_teacher_and_text_elsewhere_make_the_same_cache(dump_config, cache, tmp_path):
    moved = tmp_path / "elsewhere"
    teacher = shutil.copytree(dump_config.teacher, moved / "teacher")
    data = shutil.copy(dump_config.data, moved / "documents.jsonl")
    dump(dataclasses.replace(dump_config, teacher=str(teacher), data=str(data)), cache)


def test_another_shard_count_is_refused(dump_config, cache):
    message = "found 2 train shards, this command makes 3"
    refused(dataclasses.replace(dump_config, shards=3), cache, message)


def test_a_folder_that_is_no_cache_is_refused(dump_config, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty and no cache.*thesis.tex"):
        dump(dump_config, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_foreign_parquet_file_by_a_shards_name_is_kept(dump_config, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "train-00000-of-00002.parquet"
    pq.write_table(pa.table({"text": ["mine"]}), path)
    refused(dump_config, tmp_path, "not a shard of a cache")


def test_tokens_alone_need_no_teacher(dump_config, tokenizer_dir, cache_dir, tmp_path):
    config = dataclasses.replace(
        dump_config, kind="tokens", teacher=None, tokenizer=str(tokenizer_dir)
    )
    dump(config, tmp_path / "cache")
    verify_cache(tmp_path / "cache", deep=True)
    for split in SPLITS:
        reader, full = CacheReader(tmp_path / "cache", split), CacheReader(cache_dir, split)
        assert reader.fingerprint["teacher"]["weights_sha256"] is None
        assert reader.vocab_size == 300
        for number in range(len(full)):
            row = reader.row(number)
            assert row.record is None
            np.testing.assert_array_equal(row.tokens, full.row(number).tokens)
    names = {path.name for path in (tmp_path / "cache" / "teacher").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}


def test_shards_open_with_datasets_alone(cache_dir):
    import datasets

    files = [str(path) for path in shard_paths(cache_dir) if path.name.startswith("train")]
    rows = datasets.load_dataset("parquet", data_files=files, split="train")
    assert rows["row"] == list(range(len(rows)))
    row = rows[5]
    assert row["length"] == len(row["tokens"])
    assert len(row["ids"]) == len(row["logprobs"]) == 8 * (row["length"] - 1)


def test_verify_names_every_fault(cache):
    verify_cache(cache, deep=True)
    first, second = shard_paths(cache)[:2]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 16
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-9])
    with pytest.raises(DamagedError) as caught:
        verify_cache(cache, deep=True)
    assert first.name in caught.value.message
    assert second.name in caught.value.message
    with pytest.raises(DamagedError) as caught:
        verify_cache(cache, deep=False)
    assert first.name not in caught.value.message


def test_verify_misses_a_whole_split_and_the_sidecar(cache):
    (cache / "validation-00000-of-00001.parquet").rename(cache / "kept")
    with pytest.raises(DamagedError, match="found 0 validation rows"):
        verify_cache(cache, deep=False)
    (cache / "kept").rename(cache / "validation-00000-of-00001.parquet")
    (cache / "teacher" / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedError, match="tokenizer_sha256"):
        verify_cache(cache, deep=False)
    shutil.rmtree(cache / "teacher")
    with pytest.raises(DamagedError, match="teacher is missing"):
        verify_cache(cache, deep=False)
