"""Every way to spread a teacher over ranks gives the records of plain transformers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared.cache import CacheReader
from shared.store import open_store
from teacher_dump.verify import verify_deep

TORCHRUN = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc_per_node", "2"]
TOLERANCE = 1 / 64 + 1e-3  # nats: the cache's rounding, and another order of sums in float32


@pytest.fixture(scope="module")
def llama_dir(tokenizer_dir, tmp_path_factory):
    """A random Llama of 2 layers, width 32, with tied embeddings and a padded vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
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


def on_two_ranks(teacher, corpus, out, *options, ranks=TORCHRUN):
    """Dump to `out` with 3 shards, which two ranks share unevenly."""
    command = [
        *ranks, "-m", "teacher_dump", "--preset", "tiny", "--teacher", teacher, "--data", corpus,
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


@pytest.mark.parametrize("architecture", ["teacher_dir", "llama_dir"])
@pytest.mark.parametrize("parallel", ["data", "zero3", "tensor"])
def test_two_ranks_give_the_records_of_transformers(
    parallel, architecture, corpus, tmp_path, request
):
    teacher = request.getfixturevalue(architecture)
    out = tmp_path / "cache"
    done = on_two_ranks(teacher, corpus, out, "--parallel", parallel)
    assert done.returncode == 0, done.stderr
    assert "bytes/token" in done.stdout
    check_against_transformers(out, teacher)
    assert "rows computed again" in verify_deep(open_store(out), str(teacher), 8)
    again = on_two_ranks(teacher, corpus, out, "--parallel", parallel)
    assert "made 0 of its" in again.stderr
