"""What each phase starts from."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config import resolve
from shared.errors import DamagedError
from student_train.config import RunConfig
from student_train.growth import build_student, inherit, phases
from student_train.model import width_rule_std


def settings(**changes):
    given = {"blocks": 3, "layers_per_block": 1, "steps_per_phase": 10, "warmup_steps": 2}
    return resolve(RunConfig, "student", "tiny", given | changes)


def test_grow_adds_a_block_per_phase_and_joint_has_one_phase():
    grown = phases(settings(curriculum="grow"))
    assert [(p.active_blocks, p.first_step, p.steps) for p in grown] == [
        (1, 0, 10), (2, 10, 10), (3, 20, 10),
    ]  # fmt: skip
    (joint,) = phases(settings(curriculum="joint"))
    assert (joint.active_blocks, joint.first_step, joint.steps) == (3, 0, 10)


@pytest.mark.parametrize(("norm", "extra"), [("pre", "norm"), ("post", "entry_norm")])
def test_the_ends_come_from_the_teacher_and_its_embedding_is_frozen(cache_dir, norm, extra):
    student = build_student(settings(norm=norm), cache_dir / "teacher", 320, 2)
    teacher = load_file(cache_dir / "teacher" / "teacher.safetensors")
    state = student.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], teacher["embed_tokens.weight"])
    assert torch.equal(state["lm_head.weight"], teacher["lm_head.weight"])
    assert torch.equal(state[f"model.{extra}.weight"], teacher["norm.weight"])
    frozen = [name for name, p in student.named_parameters() if not p.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]


def test_new_weights_follow_the_width_rule(cache_dir):
    assert width_rule_std(4096) == 0.02
    student = build_student(
        dataclasses.replace(settings(), init_std=None), cache_dir / "teacher", 320, 3
    )
    drawn = torch.cat([p.flatten() for n, p in student.named_parameters() if "proj" in n])
    assert drawn.std().item() == pytest.approx(0.02 * (4096 / 32) ** 0.5, rel=0.02)


def test_an_append_keeps_what_was_trained_and_draws_only_the_new_block(cache_dir, tmp_path):
    trained = {
        name: torch.full_like(tensor, 0.5)
        for name, tensor in build_student(settings(), cache_dir / "teacher", 320, 1)
        .state_dict()
        .items()
    }
    save_file(trained, tmp_path / "model.safetensors")
    fresh = build_student(settings(), cache_dir / "teacher", 320, 2).state_dict()
    student = build_student(settings(), cache_dir / "teacher", 320, 2)
    inherit(student, tmp_path)
    for name, tensor in student.state_dict().items():
        expected = trained.get(name, fresh[name])
        assert torch.equal(tensor, expected), name
        assert (name in trained) == (".layers.1." not in name)


def test_an_export_of_another_shape_is_refused_by_tensor(cache_dir, tmp_path):
    student = build_student(settings(), cache_dir / "teacher", 320, 1)
    save_file({"lm_head.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedError, match=r"lm_head\.weight differs"):
        inherit(student, tmp_path)


def test_sizes_come_from_the_teacher(cache_dir):
    teacher = json.loads((cache_dir / "teacher" / "config.json").read_text())
    config = build_student(settings(d_ff=40), cache_dir / "teacher", 320, 1).config
    assert config.d_ff == 40
    assert config.d_model == teacher["hidden_size"]
    assert config.head_dim == teacher["head_dim"]
    assert config.rope_theta == teacher["rope_parameters"]["rope_theta"]
