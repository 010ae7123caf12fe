"""Record i is about token i + 1, from the teacher through dump, cache and stream to the loss.

The teacher is known in closed form: its layers add nothing and its embedding is one-hot, so its
logits after token v are row v of a table that the test writes into its head.
"""

import dataclasses
import math
import shutil

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared.cache import CacheReader
from student_train.loss import DistillHead, LossWeights
from student_train.stream import training_batches
from teacher_dump.dump import dump

VOCAB = 300


@pytest.fixture(scope="module")
def table():
    """Teacher logits [token, next token]; every row has its own order."""
    generator = torch.Generator().manual_seed(4)
    return 2 * torch.randn(VOCAB, VOCAB, generator=generator)


@pytest.fixture(scope="module")
def table_teacher(table, tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-12,
        head_dim=8,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        # The final norm turns a one-hot vector into one of length sqrt(width).
        model.lm_head.weight.copy_(table.T / math.sqrt(VOCAB))
    model.save_pretrained(folder)
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


@pytest.mark.parametrize("kind", ["topk", "sample"])
def test_from_the_teacher_to_the_loss(dump_config, table_teacher, table, tmp_path, kind):
    config = dataclasses.replace(
        dump_config, teacher=str(table_teacher), kind=kind, k=20, samples=4000, max_rows=30
    )
    dump(config, tmp_path / "cache")
    reader = CacheReader(tmp_path / "cache", "train")
    (batch,), _ = next(training_batches(reader, 0, range(1), 30, 30, 0, 1))
    seen = batch.tokens[batch.positions]  # the token that each position has just read
    logprobs = table.log_softmax(1)

    for i, v in enumerate(seen.tolist()):
        kept = int(batch.targets.kept[i])
        ids, values = batch.targets.ids[i, :kept], batch.targets.logprobs[i, :kept]
        exact = logprobs[v, ids]
        if kind == "topk":
            assert ids.tolist() == logprobs[v].topk(20).indices.tolist()
            torch.testing.assert_close(values, exact, atol=1 / 64 + 1e-4, rtol=0)
        else:
            noise = (values.exp() - exact.exp()).abs() / (exact.exp() / 4000).sqrt()
            assert noise[exact.exp() > 0.01].max() < 6

    def losses(last_token):
        """(KD, CE) of a student that predicts as the teacher does after `last_token`."""
        head = DistillHead(VOCAB, VOCAB, 64)
        with torch.no_grad():
            head.weight.copy_(table.T)
            hidden = torch.nn.functional.one_hot(last_token, VOCAB).float()
            _, kd, ce = head(hidden, batch.targets, LossWeights(0.5, 0.5, 1.0), 1.0)
        return kd, ce

    kd, ce = losses(seen)
    assert kd.mean() < (1e-4 if kind == "topk" else 0.05)
    following = batch.tokens[batch.positions + 1]
    torch.testing.assert_close(ce, -logprobs[seen, following], rtol=1e-4, atol=1e-4)
    shifted, _ = losses(following)
    assert shifted.mean() > 1
