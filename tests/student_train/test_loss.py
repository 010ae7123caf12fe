"""The fused head against a float64 reference that materialises everything."""

import pytest
import torch

from student_train import loss as loss_module
from student_train.loss import DistillHead, LossWeights, Targets

WEIGHTS = [LossWeights(0.7, 0.3, 1.0), LossWeights(0.7, 0.3, 2.0), LossWeights(1.3, 0.0, 0.5)]


def planted(n=37, d=16, v=50, k=5, scale=1.0, seed=0):
    """Random hidden states [n, d], head [v, d] and records, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    teacher = (2 * randn(n, v)).log_softmax(1)
    logprobs, ids = teacher.topk(k)
    tail = teacher.scatter(1, ids, -torch.inf).logsumexp(1)
    labels = torch.randint(v, (n,), generator=generator)
    return randn(n, d) * scale, randn(v, d), Targets(labels, ids, logprobs, tail, full(n, k))


def full(n, k):
    return torch.full((n,), k)


def reference(hidden, weight, targets, weights):
    """(loss, KD [n], CE [n]) by autograd, from the definition in loss.py."""
    q = (hidden @ weight.T).log_softmax(1)
    ce = -q.gather(1, targets.labels[:, None])[:, 0]
    inside = q.gather(1, targets.ids)
    q_tail = q.scatter(1, targets.ids, -torch.inf).logsumexp(1)
    p, tail = targets.logprobs.exp().sum(1), targets.tail_logprob.exp()
    split = p * (p.log() - inside.logsumexp(1))
    if weight.shape[0] > targets.ids.shape[1]:
        split = split + tail * (targets.tail_logprob - q_tail)
    p_in = (targets.logprobs / weights.tau).log_softmax(1)
    q_in = (inside / weights.tau).log_softmax(1)
    kd = split + weights.tau**2 * p * (p_in.exp() * (p_in - q_in)).sum(1)
    return weights.alpha * kd.sum() + weights.gamma * ce.sum(), kd, ce


def gradients(function, hidden, weight):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = function(hidden, weight)
    return [*outputs, *torch.autograd.grad(outputs[0], (hidden, weight))]


def fused(targets, weights, chunk, scale=1.0):
    def function(hidden, weight):
        head = DistillHead(weight.shape[1], weight.shape[0], chunk)
        del head.weight
        head.weight = weight
        return head(hidden, targets, weights, scale)

    return function


def single(targets):
    return targets.map(lambda field: field.float() if field.dtype == torch.float64 else field)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("k", [5, 50])
def test_value_and_gradient_equal_the_reference(weights, k):
    hidden, weight, targets = planted(k=k)
    expected = gradients(lambda h, w: reference(h, w, targets, weights), hidden, weight)
    found = gradients(fused(single(targets), weights, 10), hidden.float(), weight.float())
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_saturated_student_keeps_finite_exact_gradients(weights):
    hidden, weight, targets = planted(scale=40.0)
    expected = gradients(lambda h, w: reference(h, w, targets, weights), hidden, weight)
    found = gradients(fused(single(targets), weights, 16), hidden.float(), weight.float())
    for a, b in zip(found, expected, strict=True):
        assert torch.isfinite(a).all()
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_positions_with_fewer_ids_equal_the_reference_without_padding(weights):
    hidden, weight, targets = planted(k=6)
    kept = torch.arange(len(hidden)) % 6 + 1
    dropped = torch.arange(6) >= kept[:, None]
    rest = targets.logprobs.masked_fill(~dropped, -torch.inf).logsumexp(1)
    tail = torch.logaddexp(targets.tail_logprob, rest)
    ids = torch.where(dropped, targets.ids[:, :1], targets.ids)
    garbage = targets.logprobs.masked_fill(dropped, 7.0)  # the padding's value does not matter

    def one_by_one(h, w):
        parts = []
        for i, m in enumerate(kept.tolist()):
            one = slice(i, i + 1)
            exact = Targets(targets.labels[one], ids[one, :m], garbage[one, :m], tail[one])
            parts.append(reference(h[one], w, exact, weights))
        return tuple(torch.stack(column).sum() for column in zip(*parts, strict=True))

    expected = gradients(one_by_one, hidden, weight)
    padded = single(Targets(targets.labels, ids, garbage, tail, kept))
    loss, kd, ce, *grads = gradients(fused(padded, weights, 10), hidden.float(), weight.float())
    for a, b in zip((loss, kd.sum(), ce.sum(), *grads), expected, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


def test_draws_give_an_unbiased_gradient_of_the_full_kl():
    hidden, weight, _ = planted(n=1, v=8)
    teacher = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05, 0.0, 0.0], dtype=torch.float64)
    q = (hidden @ weight.T).softmax(1)
    expected = (q - teacher) @ weight  # d KL(teacher || q) / d hidden
    label, no_tail = torch.tensor([0]), torch.tensor([-torch.inf])
    total = torch.zeros_like(expected)
    # Every outcome of two draws, weighted by its probability.
    for i in range(6):
        for j in range(6):
            shares = torch.tensor([[1.0]] if i == j else [[0.5, 0.5]]).log()
            ids = torch.tensor([[i]] if i == j else [[i, j]])
            targets = Targets(label, ids, shares, no_tail, full(1, ids.shape[1]))
            grad = gradients(
                fused(targets, LossWeights(1, 0, 1), 8), hidden.float(), weight.float()
            )
            total += teacher[i] * teacher[j] * grad[3]
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


def test_without_gradients_none_is_formed(monkeypatch):
    hidden, weight, targets = planted()
    head = DistillHead(weight.shape[1], weight.shape[0], 8)
    asked = []
    real = loss_module._chunk
    monkeypatch.setattr(loss_module, "_chunk", lambda *a: asked.append(a[3]) or real(*a))
    with torch.no_grad():
        head(hidden.float(), single(targets), WEIGHTS[0], 1.0)
    head(hidden.float(), single(targets), WEIGHTS[0], 1.0)
    assert asked == [False] * 5 + [True] * 5


def test_at_tau_one_it_is_the_kl_on_k_plus_one_buckets():
    hidden, weight, targets = planted()
    q = (hidden @ weight.T).log_softmax(1)
    q_tail = q.scatter(1, targets.ids, -torch.inf).logsumexp(1)
    buckets = (targets.logprobs.exp() * (targets.logprobs - q.gather(1, targets.ids))).sum(1)
    buckets = buckets + targets.tail_logprob.exp() * (targets.tail_logprob - q_tail)
    _, kd, _ = fused(single(targets), WEIGHTS[0], 8)(hidden.float(), weight.float())
    torch.testing.assert_close(kd.double(), buckets, rtol=1e-5, atol=1e-5)


def test_a_student_equal_to_its_teacher_has_no_distillation_loss():
    hidden, weight, targets = planted()
    q = (hidden @ weight.T).log_softmax(1)
    logprobs, ids = q.topk(5)
    tail = q.scatter(1, ids, -torch.inf).logsumexp(1)
    same = Targets(targets.labels, ids, logprobs, tail, targets.kept)
    _, kd, _ = fused(single(same), LossWeights(1, 0, 1), 8)(hidden.float(), weight.float())
    assert kd.abs().max() < 1e-5


def test_without_records_it_is_cross_entropy():
    hidden, weight, targets = planted()
    loss, kd, ce = fused(Targets(targets.labels), LossWeights(0.7, 1.0, 1.0), 8)(
        hidden.float(), weight.float()
    )
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets.labels, reduction="sum")
    torch.testing.assert_close(loss.double(), expected)
    assert not kd.any()
    torch.testing.assert_close(ce.sum(), loss)


def test_chunks_and_scale_change_nothing_but_the_scale():
    hidden, weight, targets = planted()
    hidden, weight, targets = hidden.float(), weight.float(), single(targets)
    whole = gradients(fused(targets, WEIGHTS[1], 1000), hidden, weight)
    parts = gradients(fused(targets, WEIGHTS[1], 7, scale=0.25), hidden, weight)
    for index in (0, 3, 4):
        torch.testing.assert_close(parts[index], 0.25 * whole[index])


def test_a_factor_on_the_loss_reaches_both_gradients():
    hidden, weight, targets = planted()
    function = fused(single(targets), WEIGHTS[0], 16)
    once = gradients(function, hidden.float(), weight.float())
    thrice = gradients(lambda h, w: (3 * function(h, w)[0],), hidden.float(), weight.float())
    torch.testing.assert_close(thrice[1], 3 * once[3])
    torch.testing.assert_close(thrice[2], 3 * once[4])


def test_no_position_gives_zero_not_nan():
    hidden, weight, targets = planted()
    found = gradients(
        fused(single(targets.chunk(slice(0, 0))), WEIGHTS[0], 8),
        hidden[:0].float(),
        weight.float(),
    )
    assert found[0] == 0
    assert not found[4].any()


def test_float16_storage_that_sums_above_one_stays_non_negative():
    hidden, weight, targets = planted()
    rounded = Targets(
        targets.labels,
        targets.ids,
        targets.logprobs.half().float() + 1e-3,
        targets.tail_logprob.float(),
        targets.kept,
    )
    _, kd, _ = fused(rounded, LossWeights(1, 0, 1), 8)(hidden.float(), weight.float())
    assert (kd >= 0).all()
