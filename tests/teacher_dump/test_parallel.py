"""Every way to spread a teacher over ranks gives the records of plain transformers."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared.cache import CacheReader
from shared.errors import UsageError
from shared.store import open_store
from teacher_dump.dump import dump
from teacher_dump.verify import verify_deep

TOLERANCE = 1 / 64 + 1e-3  # nats: the cache's rounding, and another order of sums in float32


@pytest.fixture(scope="module")
def llama_dir(tokenizer_dir, tmp_path_factory):
    """A random Llama of 2 layers, width 32, with tied embeddings and a padded vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=128,  # AutoTP splits into pieces of 64
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


def on_ranks(count, teacher, corpus, out, *options):
    """Dump to `out` under torchrun, with 3 shards, which several ranks share unevenly."""
    torchrun = [Path(sys.executable).parent / "torchrun", "--standalone"]
    return run(
        [*torchrun, "--nproc_per_node", count, "-m", "teacher_dump"], teacher, corpus, out, *options
    )


def run(start, teacher, corpus, out, *options):
    command = [
        *start, "--preset", "tiny", "--teacher", teacher, "--data", corpus,
        "--shards", "2", "--validation-fraction", "0.1", "--max-length", "48", "--k", "8",
        "--batch-tokens", "500", "--head-positions", "100", "--out", out, *options,
    ]  # fmt: skip
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM")
    env = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    return subprocess.run(
        [str(part) for part in command],
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def check_against_transformers(cache, teacher):
    """Compare a fifth of all rows with the full float64 log-softmax of the plain model."""
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    for split in ("train", "validation"):
        reader = CacheReader(cache, split)
        for number in range(0, len(reader), 5):
            row = reader.row(number)
            with torch.inference_mode():
                logits = model(torch.from_numpy(row.tokens[None]).long()).logits[0, :-1]
            ids = reader.fingerprint["token_ids"]
            expected = logits[:, :ids].double().log_softmax(-1).numpy()
            found = np.take_along_axis(expected, row.record.ids, axis=1)
            np.testing.assert_allclose(row.record.logprobs, found, rtol=0, atol=TOLERANCE)
            best = -np.sort(-expected, axis=1)[:, :8]  # equal ones may have changed places
            np.testing.assert_allclose(found, best, rtol=0, atol=1e-3)


def weights_of_rank_0(done):
    return int(re.search(r"rank 0 of \d holds (\d+) weights", done.stderr)[1])


@pytest.mark.parametrize("architecture", ["teacher_dir", "llama_dir"])
@pytest.mark.parametrize("parallel", ["data", "zero3", "tensor"])
def test_two_ranks_give_the_records_of_transformers(
    parallel, architecture, corpus, tmp_path, request
):
    teacher = request.getfixturevalue(architecture)
    out = tmp_path / "cache"
    done = on_ranks(2, teacher, corpus, out, "--parallel", parallel)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.count("bytes/token")  # a line for each split
    assert printed in (2, 4) if parallel == "data" else printed == 2  # ranks that do not talk
    check_against_transformers(out, teacher)
    assert "rows computed again" in verify_deep(open_store(out), str(teacher), 8)
    total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(teacher).parameters())
    if parallel == "zero3":
        assert weights_of_rank_0(done) == pytest.approx(total / 2, rel=0.01)
    if parallel == "tensor":  # embedding and norms stay whole, a tied head becomes its own
        assert total / 2 < weights_of_rank_0(done) < total * 0.8


@pytest.mark.parametrize("parallel", ["zero3", "tensor"])
def test_a_rank_without_work_steps_along(parallel, teacher_dir, corpus, tmp_path):
    out = tmp_path / "cache"
    assert on_ranks(1, teacher_dir, corpus, out).returncode == 0
    lost = out / "train-00001-of-00002.parquet"  # the third shard: rank 0's, the longer share
    lost.unlink()
    (out / "manifest.json").unlink()
    done = on_ranks(2, teacher_dir, corpus, out, "--parallel", parallel)
    assert done.returncode == 0, done.stderr
    assert "made 1 of its" in done.stderr
    assert lost.is_file()
    check_against_transformers(out, teacher_dir)
    assert json.loads((out / "manifest.json").read_text())["shards"]
    again = on_ranks(2, teacher_dir, corpus, out, "--parallel", parallel)
    assert again.returncode == 0, again.stderr
    assert "made 0 of its" in again.stderr
    assert "weights of the teacher" not in again.stderr  # nobody loaded it


def test_two_teachers_of_two_ranks_each(teacher_dir, corpus, tmp_path):
    out = tmp_path / "cache"
    done = on_ranks(4, teacher_dir, corpus, out, "--parallel", "tensor", "--tp-size", "2")
    assert done.returncode == 0, done.stderr
    assert "worker 0 of 2: made 2 of its 2 shards" in done.stderr
    check_against_transformers(out, teacher_dir)


def test_ranks_that_do_not_divide_are_refused(dump_config, tmp_path, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    config = dataclasses.replace(dump_config, parallel="tensor", tp_size=2)
    with pytest.raises(UsageError, match="tp_size 2 does not divide the 3 ranks"):
        dump(config, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UsageError, match="tp_size is for parallel tensor, found parallel data"):
        dataclasses.replace(dump_config, tp_size=2)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 0, "worker 0 of 2: made 2 of its 2 shards"),
        (["--shards", "900"], 2, "900 train shards"),
    ],
)
def test_the_command_starts_ranks_by_itself(options, code, message, teacher_dir, corpus, tmp_path):
    start = [Path(sys.executable).parent / "teacher-dump", "--num-gpus", "2"]
    done = run(start, teacher_dir, corpus, tmp_path / "cache", *options)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert (tmp_path / "cache" / "manifest.json").is_file() == (code == 0)
