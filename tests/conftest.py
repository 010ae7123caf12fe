"""Fixtures of several folders: a random teacher of two layers, a small corpus, a small cache."""

import functools
import json
import os
import random
import shutil
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: other work shares the cores

import pytest

SENTENCE = (
    "a small model learns the order of words from text and the teacher gives every next word "
    "its probability so that rows records shards and caches can be checked one by one"
)
WORDS = SENTENCE.split()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """240 distinct documents of 1 to 60 words; one is longer than any row of the tests."""
    rng = random.Random(0)
    texts = [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(0, 60))) for i in range(239)]
    return [*texts, "end " + " ".join(rng.choices(WORDS, k=400))]


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory) -> Path:
    """The documents as JSON lines with the field `text`."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(corpus, tmp_path_factory) -> Path:
    """A byte-level BPE tokenizer of 300 ids trained on the corpus."""
    from teacher_dump.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(str(corpus), None, "text", 0.1, 300, folder)
    return folder


@pytest.fixture(scope="session")
def make_teacher(tokenizer_dir):
    """make_teacher(folder, seed): a random Qwen3 of 2 layers, width 32, vocabulary 320."""
    return functools.partial(_make_teacher, tokenizer_dir)


def _make_teacher(tokenizer_dir: Path, folder: Path, seed: int) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture(scope="session")
def teacher_dir(make_teacher, tmp_path_factory) -> Path:
    """A random tiny teacher with its tokenizer."""
    return make_teacher(tmp_path_factory.mktemp("models") / "teacher", seed=0)


@pytest.fixture(scope="session")
def dump_config(corpus, teacher_dir):
    """Settings of the small cache; change some with dataclasses.replace."""
    from teacher_dump.config import DumpConfig

    return DumpConfig(
        teacher=str(teacher_dir),
        revision=None,
        tokenizer=None,
        data=str(corpus),
        data_config=None,
        text_field="text",
        shards=2,
        validation_shards=1,
        validation_fraction=0.1,
        max_rows=None,
        max_validation_rows=None,
        max_length=48,
        kind="topk",
        k=8,
        min_prob=None,
        top_p=None,
        samples=50,
        sample_seed=0,
        dtype="float32",
        parallel="data",
        tp_size=None,
        batch_tokens=1024,
        head_positions=100,
    )


@pytest.fixture(scope="session")
def cache_dir(dump_config, tmp_path_factory) -> Path:
    """A finished cache of two train shards and one validation shard; do not change it."""
    from teacher_dump.dump import dump

    folder = tmp_path_factory.mktemp("caches") / "cache"
    dump(dump_config, folder)
    return folder


@pytest.fixture
def cache(cache_dir, tmp_path) -> Path:
    """A copy of the small cache, free to be damaged."""
    return Path(shutil.copytree(cache_dir, tmp_path / "cache"))
