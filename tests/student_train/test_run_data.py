"""Reading a run folder: what it holds, and each way it can be damaged, named."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.errors import DamagedError, UsageError
from student_train.report import load_run

STEPS = 8  # of each of two phases


@pytest.fixture
def run(tmp_path):
    """A complete grow run of two blocks with three documents, in no order on disk."""
    phases = [{"index": i, "active_blocks": i + 1, "steps": STEPS} for i in range(2)]
    config = {
        "norm": "pre", "curriculum": "grow", "seed": 3, "layers_per_block": 2, "phases": phases,
        "cache": {"fingerprint": {"data": "cafe"}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = [
        {
            "step": n, "phase": (n - 1) // STEPS, "phase_step": (n - 1) % STEPS + 1,
            "tokens": 10 * n, "loss": 1.5, "kd": None, "ce": 2.0 + n, "tokens_per_s": 7.0,
        }
        for n in range(1, 2 * STEPS + 1)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for phase in (0, 1):
        for step in (0, STEPS):
            validate(tmp_path, phase, step)
    return tmp_path


def validate(run, phase, step, documents=(2, 0, 1), ce=(6.0, 2.0, 4.0)):
    table = pa.table(
        {
            "document": pa.array(documents, pa.int64()),
            "tokens": pa.array([3, 1, 2][: len(documents)], pa.int64()),
            "ce_nats": pa.array(ce, pa.float64()),
            "kd_nats": pa.array([None] * len(documents), pa.float64()),
        }
    )
    (run / "validation").mkdir(exist_ok=True)
    pq.write_table(table, run / "validation" / f"phase-{phase}-step-{step:06d}.parquet")


def test_a_run_is_read_back(run):
    found = load_run(run)
    assert (found.arm, found.seed) == (("pre", "grow"), 3)
    assert found.training.ce.tolist() == [2.0 + n for n in range(1, 17)]
    assert [(v.phase, v.step) for v in found.validations] == [(0, 0), (0, 8), (1, 0), (1, 8)]
    assert found.final.document.tolist() == [0, 1, 2]
    assert found.final.tokens.tolist() == [1, 2, 3]
    assert found.final.ce_nats.tolist() == [2.0, 4.0, 6.0]
    assert (found.final.ce, found.final.kd) == (2.0, None)
    assert found.phase_tokens() == {0: 80, 1: 80}
    assert found.active_layer_tokens() == 80 * 2 + 80 * 4


def test_a_torn_last_line_of_metrics_does_not_count(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    (run / "validation" / "phase-1-step-000008.parquet").unlink()
    found = load_run(run)
    assert found.final is None
    assert found.training.step.tolist() == [1, 2, 3, 4, 5]


def cut_config(run):
    (run / "config.json").write_text('{"norm": "pre"}')


def cut_parquet(run):
    path = run / "validation" / "phase-0-step-000008.parquet"
    path.write_bytes(path.read_bytes()[:-20])


def drop_step(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:7] + lines[8:]))


def repeat_step(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:3], *lines[2:3], *lines[4:]]))


def lose_end(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:12]))


def break_line(run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"phase": 0', '"phase": ', 1))


def lose_phase(run):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"index": 1', '"index": 2'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_config, "config.json is damaged .no 'curriculum'"),
        (lose_phase, "found phase 2 in place of phase 1"),
        (cut_parquet, "phase-0-step-000008.parquet is damaged"),
        (drop_step, "metrics.jsonl is damaged: found 15 lines"),
        (repeat_step, "metrics.jsonl is damaged: found 16 lines"),
        (lose_end, "metrics.jsonl is damaged: found 12 lines"),
        (break_line, "metrics.jsonl, line 1 is damaged"),
        (lambda run: validate(run, 0, 8, ce=(1.0, np.inf, 1.0)), "infinite losses"),
        (lambda run: validate(run, 0, 0, (2, 0), (1.0, 1.0)), "same documents throughout"),
        (lambda run: validate(run, 0, 0, (3, 0, 1)), "same documents throughout"),
        (lambda run: validate(run, 2, 0), "phase 2 step 0"),
        (lambda run: validate(run, 1, 9), "phase 1 step 9"),
    ],
)
def test_a_damaged_run_is_named(run, damage, message):
    damage(run)
    with pytest.raises(DamagedError, match=message) as caught:
        load_run(run)
    assert str(run) in caught.value.message


def test_a_folder_without_a_run_and_an_unknown_arm_are_refused(run):
    with pytest.raises(UsageError, match="holds no run"):
        load_run(run / "validation")
    text = (run / "config.json").read_text().replace('"pre"', '"peri"')
    (run / "config.json").write_text(text)
    with pytest.raises(UsageError, match="peri x grow"):
        load_run(run)
