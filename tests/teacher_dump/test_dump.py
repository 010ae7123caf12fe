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

from shared.cache import CacheReader
from shared.errors import DamagedError, UsageError
from shared.shardfile import check_shard, read_footer
from shared.store import open_store
from teacher_dump.corpus import load_documents, plan_rows, token_rows
from teacher_dump.dump import dump
from teacher_dump.recording import topk_records
from teacher_dump.teacher import load_teacher, load_tokenizer
from teacher_dump.verify import verify_cache

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


def shard_paths(folder):
    return sorted(folder.glob("[tv]*.parquet"))


def verify(folder):
    return verify_cache(open_store(folder))


def assert_same_contents(folder, expected):
    for split in SPLITS:
        left, right = CacheReader(folder, split), CacheReader(expected, split)
        assert len(left) == len(right)
        for number in range(len(right)):
            a, b = left.row(number), right.row(number)
            assert a.number == b.number == number
            np.testing.assert_array_equal(a.tokens, b.tokens)
            # Rounding of the logits may tip a value over to the next step of 1/32 nat.
            for name in ("logprobs", "tail_logprob", "logsumexp"):
                left_values, right_values = getattr(a.record, name), getattr(b.record, name)
                np.testing.assert_allclose(left_values, right_values, atol=1 / 32)
                assert (left_values == right_values).mean() > 0.95 or left_values.size < 100


def test_cache_holds_the_plans_rows_and_the_teachers_records(dump_config, cache_dir):
    config = dump_config
    documents = load_documents(config.data, None, "text")
    plan = plan_rows(documents, config.validation_fraction, None, None)
    tokenizer = load_tokenizer(Path(config.teacher))
    teacher = load_teacher(Path(config.teacher), "float32", 300)
    for split in SPLITS:
        numbers = getattr(plan, split)
        reader = CacheReader(cache_dir, split)
        assert len(reader) == len(numbers)
        rows = token_rows(tokenizer, [documents[int(n)] for n in numbers], config.max_length)
        for number in range(0, len(rows), 7):
            row = reader.row(number)
            assert row.number == number
            np.testing.assert_array_equal(row.tokens, rows[number])
            (record,) = topk_records(teacher, [rows[number]], config.k, 1000)
            for name in ("logprobs", "tail_logprob", "logsumexp"):
                found, expected = getattr(row.record, name), getattr(record, name)
                np.testing.assert_allclose(found, expected, atol=1 / 64 + 1e-4)
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
    fingerprint = read_footer(open_store(cache_dir), shard_paths(cache_dir)[0].name).fingerprint
    assert fingerprint["teacher"]["name"] == "teacher"
    assert fingerprint["corpus"]["name"] == "documents.jsonl"
    assert fingerprint["corpus"]["documents"] == 240
    assert sum(fingerprint["rows"].values()) == 240
    assert (fingerprint["k"], fingerprint["vocab_size"], fingerprint["token_ids"]) == (8, 320, 300)
    assert (fingerprint["min_prob"], fingerprint["top_p"]) == (None, None)
    assert "1/32" in fingerprint["quantiser"]
    assert fingerprint["versions"]["torch"] == torch.__version__
    assert "/" not in json.dumps(fingerprint).replace("1/32", "")


def test_sidecar_gives_the_teachers_logits_without_the_teacher(cache_dir, dump_config):
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    side = load_file(cache_dir / "teacher" / "teacher.safetensors")
    assert {n: tuple(t.shape) for n, t in side.items()} == {
        "embed_tokens.weight": (320, 32),
        "lm_head.weight": (320, 32),
        "norm.weight": (32,),
    }
    model = load_teacher(Path(dump_config.teacher), "float32", 300).model
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
    message = capsys.readouterr().err
    assert "train-00001-of-00002.parquet is damaged" in message
    assert "making it again" in message
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
    check_shard(open_store(out), done[0].name)
    assert list(out.glob(".tmp-*"))
    assert not (out / "manifest.json").exists()
    with pytest.raises(DamagedError, match="incomplete, missing train-00000"):
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
    verify(out)


def test_one_worker_of_an_array_makes_its_part(dump_config, tmp_path, monkeypatch):
    for name, value in (("MIN", 3), ("ID", 4), ("MAX", 4), ("COUNT", 2)):
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
    refused(dataclasses.replace(dump_config, teacher=str(other)), cache, "is not of this cache")


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
    verify(tmp_path / "cache")
    for split in SPLITS:
        reader, full = CacheReader(tmp_path / "cache", split), CacheReader(cache_dir, split)
        assert reader.fingerprint["teacher"]["weights_sha256"] is None
        assert reader.vocab_size == 300
        for number in range(len(full)):
            row = reader.row(number)
            assert row.record is None
            np.testing.assert_array_equal(row.tokens, full.row(number).tokens)
    names = {path.name for path in (tmp_path / "cache" / "teacher").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "files.json"}


def test_draws_are_the_same_whoever_makes_the_shard(dump_config, tmp_path, monkeypatch):
    config = dataclasses.replace(dump_config, kind="sample", samples=20)
    dump(config, tmp_path / "one")
    monkeypatch.setattr("teacher_dump.dump.WINDOW_GROUPS", 1)
    dump(dataclasses.replace(config, batch_tokens=150, head_positions=11), tmp_path / "two")
    for split in SPLITS:
        one, two = (CacheReader(tmp_path / name, split) for name in ("one", "two"))
        for number in range(len(one)):
            a, b = one.row(number).record, two.row(number).record
            assert (a.counts.sum(1) == 20).all()
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.counts, b.counts)
    assert one.fingerprint["samples"] == 20
    assert "k" not in one.fingerprint


def test_min_prob_and_top_p_move_mass_to_the_tail(dump_config, cache_dir, tmp_path):
    dump(dataclasses.replace(dump_config, min_prob=0.05, top_p=0.6), tmp_path / "cache")
    cut, full = CacheReader(tmp_path / "cache", "train"), CacheReader(cache_dir, "train")
    kept = []
    for number in range(0, len(full), 5):
        a, b = cut.row(number).record, full.row(number).record
        kept += a.kept.tolist()
        expected = b.keep(a.kept)
        np.testing.assert_array_equal(a.ids, expected.ids)
        np.testing.assert_allclose(a.tail_logprob, expected.tail_logprob, atol=1 / 16)
        real = np.arange(a.ids.shape[1]) < a.kept[:, None]
        assert (a.logprobs[real] >= np.log(0.05) - 1 / 64).sum() >= real.sum() - (a.kept == 1).sum()
    assert 1 < np.mean(kept) < 8
    assert cut.fingerprint["min_prob"] == 0.05
    assert (tmp_path / "cache" / "train-00000-of-00002.parquet").stat().st_size < (
        cache_dir / "train-00000-of-00002.parquet"
    ).stat().st_size


def test_a_damaged_shard_of_another_worker_does_not_stop_this_one(
    dump_config, cache, cache_dir, monkeypatch, capsys
):
    path = cache / "train-00000-of-00002.parquet"  # shards of worker 0: validation, train 1
    path.write_bytes(path.read_bytes()[:-5])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    dump(dump_config, cache)
    assert "train-00000-of-00002.parquet is damaged" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    dump(dump_config, cache)
    assert_same_contents(cache, cache_dir)


def test_an_array_with_gaps_is_refused(dump_config, tmp_path, monkeypatch):
    for name, value in (("MIN", 3), ("ID", 7), ("MAX", 7), ("COUNT", 2)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    with pytest.raises(UsageError, match="2 tasks numbered 3 to 7, expected no gaps"):
        dump(dump_config, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_leftovers_of_killed_writers_are_removed_after_a_day(dump_config, cache):
    old, new = cache / ".tmp-a-train-00000-of-00002.parquet", cache / ".tmp-b"
    old.write_text("x")
    new.write_text("x")
    os.utime(old, (time.time() - 90_000,) * 2)
    dump(dump_config, cache)
    assert not old.exists()
    assert new.exists()
