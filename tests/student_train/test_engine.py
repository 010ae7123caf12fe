"""Every ZeRO stage, accumulation and bfloat16 train the same student, on two real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.config import load_preset
from shared.errors import UsageError
from student_train.config import RunConfig
from student_train.engine import engine_config
from student_train.growth import build_student
from student_train.loop import learning_rate

ROOT = Path(__file__).parents[2]
ARMS = [
    "zero1-float32-4",
    "zero0-float32-4",
    "zero2-float32-2",
    "zero3-float32-4",
    "zero1-bfloat16-4",
    "zero2-bfloat16-4",
    "zero3-bfloat16-4",
]
STILL = [f"zero{stage}-bfloat16-4-still" for stage in (1, 2, 3)]  # with a learning rate of nothing


@pytest.fixture(scope="module")
def arms(cache_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("arms")
    command = [
        Path(sys.executable).parent / "torchrun",
        "--standalone",
        "--nproc_per_node",
        "2",
        Path(__file__).parent / "zero_worker.py",
        cache_dir,
        out,
        *ARMS,
        *STILL,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def curve(run, key="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines]


@pytest.mark.parametrize("arm", ARMS[1:])
def test_it_trains_as_zero_one_does(arms, arm):
    bf16 = "bfloat16" in arm
    assert curve(arms / arm) == pytest.approx(curve(arms / ARMS[0]), rel=2e-2 if bf16 else 1e-5)
    if not bf16 and arm != "zero0-float32-4":  # DeepSpeed gives no norm at stage 0
        norms = [curve(arms / name, "grad_norm") for name in (arm, ARMS[0])]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for phase in (0, 1):
        found = load_file(arms / arm / "export" / f"phase-{phase}" / "model.safetensors")
        expected = load_file(arms / ARMS[0] / "export" / f"phase-{phase}" / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            # Adam's first steps are lr * sign(gradient): rounding flips the sign of the tiniest.
            close = 5e-2 if bf16 else 1e-3
            assert (found[name] - tensor).norm() <= close * tensor.norm(), name


@pytest.mark.parametrize("arm", STILL)
def test_an_append_hands_on_float32_weights_under_bfloat16(arms, arm, cache_dir):
    config = json.loads((arms / arm / "config.json").read_text())
    run = RunConfig(**{k: config[k] for k in RunConfig.__dataclass_fields__})
    for phase, blocks in ((0, 1), (1, 2)):
        drawn = build_student(run, cache_dir / "teacher", 320, blocks).state_dict()
        found = load_file(arms / arm / "export" / f"phase-{phase}" / "model.safetensors")
        for name, tensor in drawn.items():
            if "embed" not in name:  # frozen, so the teacher's, in the type of the layers
                assert torch.equal(found[name], tensor), name


def test_gradients_are_averaged_over_the_targets_of_all_ranks(arms, cache_dir):
    """Plain torch on the whole batch gives the loss that two ranks with uneven rows report."""
    from shared.cache import CacheReader
    from shared.config import resolve
    from student_train.loss import LossWeights
    from student_train.stream import training_batches

    config = json.loads((arms / ARMS[0] / "config.json").read_text())
    names = RunConfig.__dataclass_fields__
    run = resolve(RunConfig, "student", "tiny", {k: config[k] for k in names})
    reader = CacheReader(cache_dir, "train")
    student = build_student(run, cache_dir / "teacher", reader.vocab_size, 1)
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms = [], []
    weights = LossWeights(run.alpha, run.gamma, run.tau)
    for step, ((b,), n) in enumerate(training_batches(reader, 0, range(3), 8, 8, 0, 1)):
        loss, _, _ = student(b.tokens, b.layout, b.positions, b.targets, weights, 1 / n)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, run.clip).item())
        optimizer.param_groups[0]["lr"] = learning_rate(step, run)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert curve(arms / ARMS[0])[:3] == pytest.approx(losses, rel=1e-5)
    assert curve(arms / ARMS[0], "grad_norm")[:3] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("arm", ["zero2-float32-2", "zero3-float32-4"])
def test_validation_does_not_depend_on_how_rows_fall_on_ranks(arms, arm, cache_dir):
    import pyarrow.parquet as pq

    name = "validation/phase-0-step-000000.parquet"
    found = pq.read_table(arms / arm / name).to_pydict()
    assert len(found["tokens"]) % 4 in (1, 2)  # so that one rank stands in for a row in the end
    expected = pq.read_table(arms / ARMS[0] / name).to_pydict()
    for key in ("ce_nats", "kd_nats"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4)
    assert found["tokens"] == expected["tokens"]


def settings(**changes):
    from shared.config import resolve

    return resolve(RunConfig, "student", "tiny", changes)


def test_the_schedule_warms_up_and_ends_at_its_floor():
    run = settings(steps_per_phase=100, warmup_steps=10, lr=1.0, lr_min=0.1)
    rates = [learning_rate(step, run) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates == sorted(rates[:11]) + sorted(rates[11:], reverse=True)
    assert 0.1 < rates[-1] < 0.102


def test_the_batch_is_divided_over_ranks_and_accumulation():
    config = engine_config(settings(batch_rows=24, micro_rows=3), world=4)
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 2
    with pytest.raises(UsageError, match="batch_rows 24 does not divide over 5 ranks"):
        engine_config(settings(batch_rows=24), world=5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 7}}', "stage is 7, expected 0, 1, 2 or 3"),
        ('{"fp16": {"enabled": true}}', "enables fp16"),
        ('{"optimizer": {"type": "AdamW"}}', "sets 'optimizer': remove it"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_deepspeed_file_that_cannot_work_is_refused(tmp_path, text, message):
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        engine_config(settings(deepspeed_config=str(path)), world=1)


@pytest.mark.parametrize("preset", ["paper", "tiny", "tiny-teacher"])
def test_every_preset_is_a_whole_student(preset):
    from shared.config import resolve

    run = resolve(RunConfig, "student", preset, {})
    assert engine_config(run, 1)["gradient_clipping"] == load_preset(preset, "student")["clip"]
