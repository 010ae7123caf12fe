"""Records of a real (random) model against a float64 reference."""

import dataclasses

import numpy as np
import pytest
import torch
from click import ClickException

from shared.errors import UsageError
from teacher_dump.recording import divergence, row_uniforms, sample_records, topk_records
from teacher_dump.teacher import _final_gain, check_head, load_teacher

K = 8


@pytest.fixture(scope="module")
def teacher(teacher_dir):
    return load_teacher(teacher_dir, "float32", 320)


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
    for row, record in zip(rows, topk_records(teacher, rows, K, head_positions=7), strict=True):
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
    for record in topk_records(teacher, rows, K, head_positions=100):
        mass = np.exp(record.logprobs).sum(-1) + np.exp(record.tail_logprob)
        np.testing.assert_allclose(mass, 1, atol=1e-5)


def test_padding_and_chunks_do_not_change_records(teacher, rows):
    together = topk_records(teacher, rows, K, head_positions=3)
    for row, record in zip(rows, together, strict=True):
        (alone,) = topk_records(teacher, [row], K, head_positions=1000)
        np.testing.assert_allclose(record.logprobs, alone.logprobs, atol=1e-5)
        np.testing.assert_allclose(record.tail_logprob, alone.tail_logprob, atol=1e-5)
        np.testing.assert_allclose(record.logsumexp, alone.logsumexp, atol=1e-5)


def test_record_does_not_see_the_token_it_predicts(teacher, rows):
    row = rows[1]
    changed = row.copy()
    changed[20] = (changed[20] + 1) % 320
    (before,), (after,) = (topk_records(teacher, [r], K, 100) for r in (row, changed))
    np.testing.assert_allclose(before.logprobs[:20], after.logprobs[:20], atol=1e-5)
    assert np.abs(before.logprobs[20] - after.logprobs[20]).max() > 1e-3


def test_rows_of_one_token_have_no_records(teacher):
    one = np.array([3], dtype=np.int32)
    for record in topk_records(teacher, [one, one], K, 100):
        assert record.ids.shape == (0, K)
        assert record.tail_logprob.shape == record.logsumexp.shape == (0,)


def test_non_finite_logits_are_refused(teacher_dir, rows):
    teacher = load_teacher(teacher_dir, "float32", 320)
    teacher.head[7] = torch.nan
    with pytest.raises(ClickException, match="not finite"):
        topk_records(teacher, rows, K, 100)


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
        load_teacher(tmp_path, "float32", 64)

    config = Gemma2Config(**sizes, final_logit_softcapping=None)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path, "float32", 64)
    # This family stores gain - 1.
    torch.testing.assert_close(_final_gain(teacher.decoder), torch.ones(16), atol=1e-4, rtol=0)


def test_bfloat16_layers_with_a_float32_head(teacher_dir, rows):
    teacher = load_teacher(teacher_dir, "bfloat16", 320)
    check_head(teacher)
    assert teacher.head.dtype == torch.float32
    row, record = rows[1], topk_records(teacher, rows, K, 100)[1]
    with torch.inference_mode():
        ids = torch.tensor(row[None].astype(np.int64))
        hidden = teacher.decoder(input_ids=ids).last_hidden_state[0, :-1]
    exact = (hidden.double() @ teacher.head.double().T).log_softmax(-1).topk(K).values
    np.testing.assert_allclose(record.logprobs, exact.numpy(), atol=0.05)
    # A bfloat16 product would tie neighbours; a float32 one does not.
    assert (np.diff(record.logprobs, axis=-1) == 0).mean() < 0.01


def test_rows_of_the_head_beyond_the_tokenizer_are_left_out(teacher_dir, teacher, rows):
    padded = load_teacher(teacher_dir, "float32", 300)
    (record,) = topk_records(padded, [rows[1]], K, 100)
    logprobs, _, _ = reference(teacher, rows[1], K)
    real = logprobs[:, :300] - np.logaddexp.reduce(logprobs[:, :300], axis=1)[:, None]
    assert record.ids.max() < 300
    np.testing.assert_allclose(record.logprobs, np.sort(real)[:, ::-1][:, :K], atol=2e-5)
    # There is something to leave out.
    assert (np.argsort(-logprobs)[:, :K] >= 300).any()


def test_draws_follow_the_teachers_distribution(teacher, rows):
    row, draws = rows[1], 20_000
    uniforms = row_uniforms(0, "train", 5, len(row) - 1, draws)
    (record,) = sample_records(teacher, [row], [uniforms], 100)
    assert (record.counts.sum(1) == draws).all()
    p = np.exp(reference(teacher, row, K)[0])
    found = np.zeros_like(p)
    np.add.at(found, (np.arange(len(p))[:, None], record.ids), record.counts)
    expected = draws * p
    chi2 = ((found - expected) ** 2 / expected).sum()
    degrees = p.size - len(p)
    assert abs(chi2 - degrees) < 5 * np.sqrt(2 * degrees)


def test_a_rows_draws_depend_on_its_number_only(teacher, rows):
    uniforms = [row_uniforms(3, "train", i, len(row) - 1, 50) for i, row in enumerate(rows)]
    together = sample_records(teacher, rows, uniforms, head_positions=3)
    for row, mine, record in zip(rows, uniforms, together, strict=True):
        (alone,) = sample_records(teacher, [row], [mine], head_positions=100)
        assert record.ids.shape == alone.ids.shape
        np.testing.assert_array_equal(record.ids, alone.ids)
        np.testing.assert_array_equal(record.counts, alone.counts)
    assert not np.array_equal(uniforms[1], row_uniforms(3, "validation", 1, 32, 50))
    assert not np.array_equal(uniforms[1], row_uniforms(4, "train", 1, 32, 50))


def test_divergence_is_zero_for_the_same_teacher_and_exact_for_a_change(teacher, rows):
    records = [r.truncate(0.03, None) for r in topk_records(teacher, rows, K, 100)]
    assert len({record.ids.shape[1] for record in records}) > 1
    assert divergence(teacher, rows, records, 7).max() < 1e-6
    changed = []
    for record in records:
        logprobs = record.logprobs.copy()
        logprobs[:, 0] += 0.1  # of the best id, and all that follows from the sum being 1
        changed.append(dataclasses.replace(record, logprobs=logprobs))
    found = divergence(teacher, rows, changed, 100)
    p = np.concatenate([np.exp(r.logprobs[:, 0]) for r in records]).astype(np.float64)
    np.testing.assert_allclose(found, np.log1p(p * np.expm1(0.1)) - 0.1 * p, atol=1e-6)
