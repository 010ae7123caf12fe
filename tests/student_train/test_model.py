"""The stack against transformers, against plain references of its equations, and against itself."""

import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared.records import Row
from student_train.config import ModelConfig
from student_train.model import Student, initialise, rotary_table
from student_train.stream import collate

CONFIG = ModelConfig(
    norm="pre",
    blocks=2,
    layers_per_block=2,
    d_model=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    d_ff=48,
    vocab_size=60,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
)


def student(seed=0, std=0.2, **changes):
    model = Student(dataclasses.replace(CONFIG, **changes))
    initialise(model, seed, std)
    return model


def batch(lengths=(5, 9, 2)):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(60, (n,), generator=generator).int().numpy() for n in lengths]
    return collate([Row(i, row, None) for i, row in enumerate(rows)])


def logits(model, batch):
    return model.model(batch.tokens, batch.layout) @ model.lm_head.weight.T


def test_a_pre_norm_student_is_a_qwen3_model():
    model, data = student(), batch()
    stock = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=False,
        )
    ).eval()
    stock.load_state_dict(model.state_dict())
    padded = data.layout.pad(data.tokens)
    expected = stock(padded, attention_mask=data.layout.pad(torch.ones_like(data.tokens))).logits
    torch.testing.assert_close(
        logits(model, data), data.layout.unpad(expected), rtol=1e-5, atol=1e-5
    )


def plain_post(model, tokens):
    """One row through N(x + F(x)), written from the equation with explicit attention."""

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def turn(x, position):
        half = x.shape[-1] // 2
        angle = position[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    position = torch.arange(len(tokens)).float()
    stack = model.model
    x = norm(stack.embed_tokens.weight[tokens], stack.entry_norm.weight)
    for layer in stack.layers:
        a = layer.self_attn
        q = turn(norm((x @ a.q_proj.weight.T).view(-1, 4, 8), a.q_norm.weight), position)
        k = turn(norm((x @ a.k_proj.weight.T).view(-1, 2, 8), a.k_norm.weight), position)
        v = (x @ a.v_proj.weight.T).view(-1, 2, 8)
        heads = []
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / 8**0.5
            later = torch.ones_like(scores).triu(1).bool()
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, head // 2])
        x = norm(x + torch.cat(heads, -1) @ a.o_proj.weight.T, layer.input_layernorm.weight)
        m = layer.mlp
        gate = x @ m.gate_proj.weight.T
        wide = gate * gate.sigmoid() * (x @ m.up_proj.weight.T)
        x = norm(x + wide @ m.down_proj.weight.T, layer.post_attention_layernorm.weight)
    return x


def test_post_norm_equals_its_equation_in_value_and_gradient():
    # In float64: in float32 rounding alone reaches 1 % of some gradients on some processors.
    model, data = student(norm="post").double(), batch(lengths=(9,))
    with torch.no_grad():  # gains of one would hide a gain that is missing or misplaced
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    parameters = [p for n, p in model.named_parameters() if n != "lm_head.weight"]
    probe = torch.randn(9, 32, generator=torch.Generator().manual_seed(3)).double()
    found = model.model(data.tokens, data.layout)
    expected = plain_post(model, data.tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    a = torch.autograd.grad((found * probe).sum(), parameters)
    b = torch.autograd.grad((expected * probe).sum(), parameters)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_pre_and_post_have_equal_parameter_counts_and_equal_first_weights():
    pre, post = (student(norm=n) for n in ("pre", "post"))
    count = [sum(p.numel() for p in m.parameters()) for m in (pre, post)]
    assert count[0] == count[1]
    shared = pre.state_dict().keys() & post.state_dict().keys()
    assert len(shared) == len(pre.state_dict()) - 1  # all but the extra norm
    assert all(torch.equal(pre.state_dict()[n], post.state_dict()[n]) for n in shared)


def test_a_deeper_student_starts_from_the_tensors_of_a_shallower_one():
    shallow, deep = student(blocks=1).state_dict(), student(blocks=3).state_dict()
    assert all(torch.equal(deep[name], tensor) for name, tensor in shallow.items())
    other = student(blocks=1, seed=1).state_dict()
    assert not torch.equal(other["lm_head.weight"], shallow["lm_head.weight"])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_row_is_blind_to_its_batch_and_to_later_tokens(norm):
    model, together = student(norm=norm), batch((5, 9, 2))
    alone = collate([Row(0, together.tokens[5:14].int().numpy(), None)])
    torch.testing.assert_close(
        logits(model, together)[5:14], logits(model, alone), rtol=1e-5, atol=1e-5
    )
    changed = together.tokens.clone()
    changed[13] = (changed[13] + 1) % 60
    later = model.model(changed, together.layout) @ model.lm_head.weight.T
    torch.testing.assert_close(later[5:13], logits(model, together)[5:13])
    assert not torch.allclose(later[13], logits(model, together)[13])


def test_rotary_positions_count_within_a_row():
    data = batch((3, 4))
    cos, _ = rotary_table(data.layout.index % data.layout.time, CONFIG, torch.float32)
    torch.testing.assert_close(cos[:3], cos[3:6])
