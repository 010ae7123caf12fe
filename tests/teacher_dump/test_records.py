"""Top-k records of a real (random) model against a float64 reference."""

import numpy as np
import pytest
import torch

from shared.errors import UsageError
from teacher_dump.teacher import _final_gain, check_head, load_teacher, records

K = 8


@pytest.fixture(scope="module")
def teacher(teacher_dir):
    return load_teacher(teacher_dir, "float32")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 320, n).astype(np.int32) for n in (5, 33, 1, 2, 17)]


def reference(teacher, row, k):
    """(log-probabilities [T - 1, vocab], their top-k sum complement, logsumexp) in float64."""
    with torch.inference_mode():
        logits = teacher.model(input_ids=torch.tensor(row[None].astype(np.int64))).logits[0, :-1]
    logits = logits.double()
    logprobs = logits.log_softmax(-1)
    rest = logprobs.sort(-1, descending=True).values[:, k:]
    return logprobs.numpy(), rest.logsumexp(-1).numpy(), logits.logsumexp(-1).numpy()


def test_records_equal_the_full_log_softmax_in_float64(teacher, rows):
    for row, record in zip(rows, records(teacher, rows, K, head_positions=7), strict=True):
        logprobs, tail, logsumexp = reference(teacher, row, K)
        assert record.ids.shape == record.logprobs.shape == (len(row) - 1, K)
        assert record.ids.dtype == np.int32
        best = np.sort(logprobs, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(record.logprobs, best, atol=2e-5)
        stored = np.take_along_axis(logprobs, record.ids.astype(np.int64), axis=-1)
        np.testing.assert_allclose(stored, record.logprobs, atol=2e-5)
        np.testing.assert_allclose(record.tail_logprob, tail, atol=2e-5)
        np.testing.assert_allclose(record.logsumexp, logsumexp, atol=2e-5)


def test_mass_of_a_record_is_one(teacher, rows):
    for record in records(teacher, rows, K, head_positions=100):
        mass = np.exp(record.logprobs).sum(-1) + np.exp(record.tail_logprob)
        np.testing.assert_allclose(mass, 1, atol=1e-5)


def test_padding_and_chunks_do_not_change_records(teacher, rows):
    together = records(teacher, rows, K, head_positions=3)
    for row, record in zip(rows, together, strict=True):
        (alone,) = records(teacher, [row], K, head_positions=1000)
        np.testing.assert_allclose(record.logprobs, alone.logprobs, atol=1e-5)
        np.testing.assert_allclose(record.tail_logprob, alone.tail_logprob, atol=1e-5)
        np.testing.assert_allclose(record.logsumexp, alone.logsumexp, atol=1e-5)


def test_record_does_not_see_the_token_it_predicts(teacher, rows):
    row = rows[1]
    changed = row.copy()
    changed[20] = (changed[20] + 1) % 320
    (before,), (after,) = (records(teacher, [r], K, 100) for r in (row, changed))
    np.testing.assert_allclose(before.logprobs[:20], after.logprobs[:20], atol=1e-5)
    assert np.abs(before.logprobs[20] - after.logprobs[20]).max() > 1e-3


def test_rows_of_one_token_have_no_records(teacher):
    one = np.array([3], dtype=np.int32)
    for record in records(teacher, [one, one], K, 100):
        assert record.ids.shape == (0, K)
        assert record.tail_logprob.shape == record.logsumexp.shape == (0,)


def test_non_finite_logits_are_refused(teacher_dir, rows):
    teacher = load_teacher(teacher_dir, "float32")
    teacher.head[7] = torch.nan
    with pytest.raises(UsageError, match="not finite"):
        records(teacher, rows, K, 100)


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    Gemma2ForCausalLM(Gemma2Config(**sizes, initializer_range=0.3)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="changes its logits"):
        load_teacher(tmp_path, "float32")

    config = Gemma2Config(**sizes, final_logit_softcapping=None)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path, "float32")
    # This family stores gain - 1.
    torch.testing.assert_close(_final_gain(teacher.decoder), torch.ones(16), atol=1e-4, rtol=0)


def test_bfloat16_layers_with_a_float32_head(teacher_dir, rows):
    teacher = load_teacher(teacher_dir, "bfloat16")
    check_head(teacher)
    assert teacher.head.dtype == torch.float32
    row, record = rows[1], records(teacher, rows, K, 100)[1]
    with torch.inference_mode():
        ids = torch.tensor(row[None].astype(np.int64))
        hidden = teacher.decoder(input_ids=ids).last_hidden_state[0, :-1]
    exact = (hidden.double() @ teacher.head.double().T).log_softmax(-1).topk(K).values
    np.testing.assert_allclose(record.logprobs, exact.numpy(), atol=0.05)
    # A bfloat16 product would tie neighbours; a float32 one does not.
    assert (np.diff(record.logprobs, axis=-1) == 0).mean() < 0.01
