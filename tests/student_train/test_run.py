"""Whole runs with real ranks: what is left behind, resuming, and what is refused."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from launching import SMALL, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.cache import CacheReader
from student_train.cli import main, run_command
from student_train.config import RunConfig
from student_train.export import load_student

SAME = ("step", "phase", "phase_step", "tokens", "loss", "kd", "ce", "grad_norm", "lr")


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run):
    return [[line[key] for key in SAME] for line in metrics(run)]


def invoke(*args):
    return CliRunner().invoke(main, ["run", *SMALL, *map(str, args)])


def test_a_run_leaves_what_the_folder_promises(grown, cache_dir):
    lines = metrics(grown)
    assert [(x["step"], x["phase"], x["phase_step"]) for x in lines] == [
        (step + 1, step // 8, step % 8 + 1) for step in range(16)
    ]
    reader = CacheReader(cache_dir, "train")
    assert lines[-1]["tokens"] > lines[0]["tokens"] > 0
    assert lines[0]["lr"] == lines[8]["lr"] < lines[1]["lr"]  # the schedule starts again
    assert len(reader) > 0
    config = json.loads((grown / "config.json").read_text())
    assert [p["active_blocks"] for p in config["phases"]] == [1, 2]
    for phase in (0, 1):
        tag = grown / "checkpoints" / f"phase-{phase}-end"
        assert len(list(tag.glob("*optim_states.pt"))) == 2  # one ZeRO part per rank
        for step in (0, 8):
            table = pq.read_table(grown / "validation" / f"phase-{phase}-step-{step:06d}.parquet")
            held_out = CacheReader(cache_dir, "validation")
            assert table["tokens"].to_pylist() == (held_out.lengths - 1).tolist()
            assert all(nats > 0 for nats in table["ce_nats"].to_pylist())


def test_the_frozen_embedding_stays_the_teachers_and_the_head_moves(grown, cache_dir):
    teacher = load_file(cache_dir / "teacher" / "teacher.safetensors")
    for phase in (0, 1):
        student = load_file(grown / "export" / f"phase-{phase}" / "model.safetensors")
        assert torch.equal(student["model.embed_tokens.weight"], teacher["embed_tokens.weight"])
        assert not torch.equal(student["lm_head.weight"], teacher["lm_head.weight"])


def test_validation_losses_are_those_of_the_export(grown, cache_dir):
    from student_train.loss import LossWeights
    from student_train.stream import collate

    student = load_student(grown / "export" / "phase-1")
    reader = CacheReader(cache_dir, "validation")
    table = pq.read_table(grown / "validation" / "phase-1-step-000008.parquet").to_pydict()
    for number in range(len(reader)):
        b = collate([reader.row(number)])
        with torch.no_grad():
            _, kd, ce = student(
                b.tokens, b.layout, b.positions, b.targets, LossWeights(1, 1, 1), 1.0
            )
        assert float(ce.double().sum()) == pytest.approx(table["ce_nats"][number], rel=1e-4)
        assert float(kd.double().sum()) == pytest.approx(table["kd_nats"][number], rel=1e-4)


def test_kill_9_in_mid_phase_then_the_same_command_gives_the_same_curve(grown, cache_dir, tmp_path):
    out = tmp_path / "killed"
    args = ["--norm", "post", "--cache", cache_dir, "--out", out, "--checkpoint-every", "3"]
    log = out / "metrics.jsonl"
    killed = launch("deepspeed", args, lambda: log.exists() and log.read_text().count("\n") >= 13)
    assert killed.returncode == -9
    position = json.loads((out / "checkpoints" / "manifest.json").read_text())
    assert (position["phase"], position["done"]) == (1, False)
    (out / "checkpoints" / "phase-1-step-000006").mkdir(exist_ok=True)  # as a kill may leave
    with log.open("a") as file:
        file.write('{"step": 14, "pha')
    resumed = launch("torchrun", args)
    assert resumed.returncode == 0, resumed.stdout
    assert "resuming" in resumed.stdout
    uninterrupted = tmp_path / "uninterrupted"
    shutil.copytree(grown, uninterrupted)
    assert curve(out) == curve(uninterrupted)
    for phase in (0, 1):
        name = f"export/phase-{phase}/model.safetensors"
        assert (out / name).read_bytes() == (grown / name).read_bytes()
    tags = {path.name for path in (out / "checkpoints").iterdir() if path.is_dir()}
    assert tags == {"phase-0-end", "phase-1-end"}


def test_one_process_trains_a_pre_norm_student_that_transformers_opens(cache_dir, tmp_path):
    out = tmp_path / "run"
    args = ["--norm", "pre", "--curriculum", "joint", "--cache", cache_dir, "--out", out]
    done = launch("python", args)
    assert done.returncode == 0, done.stdout
    assert "complete: nothing to do" in launch("python", args).stdout
    folder = tmp_path / "export"
    command = ["export", str(out), "--out", str(folder), "--dtype", "bfloat16"]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert CliRunner().invoke(main, command).exit_code == 2  # it exists now
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)("the model learns", return_tensors="pt")
    student = load_student(folder)
    from shared.records import Row
    from student_train.stream import collate

    batch = collate([Row(0, tokens.input_ids[0].int().numpy(), None)])
    expected = student.model(batch.tokens, batch.layout) @ student.lm_head.weight.T
    torch.testing.assert_close(model(**tokens).logits[0], expected, rtol=1e-4, atol=1e-4)


def test_a_damaged_page_met_by_a_rank_ends_all_ranks_with_exit_3(cache, tmp_path):
    path = cache / "train-00001-of-00002.parquet"
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    out = tmp_path / "run"
    args = ["--cache", cache, "--out", out, "--steps-per-phase", "40", "--checkpoint-every", "0"]
    ended = launch("deepspeed", args)
    assert ended.returncode == 3, ended.stdout
    assert f"{path.name} is damaged" in ended.stdout
    assert not (out / "export").exists()


def test_another_config_is_refused_and_nothing_changes(grown, cache_dir):
    before = {p: p.stat().st_mtime_ns for p in grown.rglob("*")}
    result = invoke("--norm", "pre", "--cache", cache_dir, "--out", grown, "--lr", "0.5")
    assert result.exit_code == 3
    assert "norm: found 'post', expected 'pre'" in result.output
    assert "lr: found 0.003, expected 0.5" in result.output
    assert before == {p: p.stat().st_mtime_ns for p in grown.rglob("*")}


def test_a_stop_inside_a_phase_needs_the_same_number_of_ranks(grown, cache_dir, tmp_path):
    out = shutil.copytree(grown, tmp_path / "run")
    manifest = out / "checkpoints" / "manifest.json"
    position = json.loads(manifest.read_text()) | {"done": False, "step": 4, "tag": "x"}
    manifest.write_text(json.dumps(position))
    result = invoke("--norm", "post", "--cache", cache_dir, "--out", out)
    assert result.exit_code == 3
    assert "on 2 ranks, found 1" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lr", "0"], "lr: found 0.0, expected a number above 0"),
        (["--warmup-steps", "8"], "warmup_steps 8 fills the phase"),
        (["--alpha", "0", "--gamma", "0"], "nothing to train on"),
        (["--deepspeed-config", "zero9"], "no DeepSpeed configuration 'zero9'"),
        (["--deepspeed-config", "zero0", "--dtype", "bfloat16"], "use zero1, zero2 or zero3"),
        (["--micro-rows", "3"], "micro_rows 3 does not divide the 8 rows"),
        (["--d-model", "64"], "the teacher's embedding is 32 wide"),
        (["--heads", "3"], "must be a multiple of kv_heads"),
        (["--preset", "nothing"], "no preset 'nothing': expected one of paper"),
        (["--k", "9"], "k: found 9, but {cache} holds k = 8"),
        (["--norm", "mid"], "'mid' is not one of 'pre', 'post'"),
    ],
)
def test_bad_settings_exit_2_before_anything_is_written(args, message, cache_dir, tmp_path):
    result = invoke("--cache", cache_dir, "--out", tmp_path / "run", *args)
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert message.format(cache=cache_dir) in result.output


def test_draws_are_learnt_from_at_temperature_one_only(dump_config, tmp_path):
    import dataclasses

    from teacher_dump.dump import dump

    dump(dataclasses.replace(dump_config, kind="sample"), tmp_path / "cache")
    for options, message in (
        (["--tau", "2"], "tau: found 2.0, expected 1"),
        (["--k", "4"], "holds kind sample"),
    ):
        result = invoke("--cache", tmp_path / "cache", "--out", tmp_path / "run", *options)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    args = ["--cache", tmp_path / "cache", "--out", tmp_path / "run", "--curriculum", "joint"]
    done = launch("python", args)
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kd = [json.loads(line)["kd"] for line in lines]
    assert 0 < kd[-1] < kd[0]


def test_bad_folders_are_refused(cache, tmp_path):
    result = invoke("--cache", tmp_path / "none", "--out", tmp_path / "run")
    assert (result.exit_code, "no cache at" in result.output) == (2, True)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    result = invoke("--cache", cache, "--out", full)
    assert (result.exit_code, "holds no run" in result.output) == (2, True)
    assert [p.name for p in full.iterdir()] == ["thesis.txt"]
    (cache / "train-00001-of-00002.parquet").unlink()
    result = invoke("--cache", cache, "--out", tmp_path / "run")
    assert (result.exit_code, "train-00001-of-00002.parquet" in result.output) == (3, True)
    assert not (tmp_path / "run").exists()


def test_a_cache_of_another_teacher_is_refused_by_a_run(grown, dump_config, make_teacher, tmp_path):
    import dataclasses

    from teacher_dump.dump import dump

    other = make_teacher(tmp_path / "teacher", seed=5)
    dump(dataclasses.replace(dump_config, teacher=str(other)), tmp_path / "cache")
    result = invoke("--norm", "post", "--cache", tmp_path / "cache", "--out", grown)
    assert result.exit_code == 3
    assert "cache.fingerprint.teacher.weights_sha256: found" in result.output


def test_short_help_works_on_the_script_too():
    assert CliRunner().invoke(run_command, ["-h"]).exit_code == 0


def test_several_nodes_need_a_place_to_meet(cache_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "2")
    result = invoke("--cache", cache_dir, "--out", tmp_path / "run")
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert "export MASTER_ADDR=$(scontrol show hostnames" in result.output


def test_help_is_quick_to_load_and_shows_every_setting():
    import subprocess
    import sys

    script = (
        "import sys\n"
        "from student_train.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for name in RunConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    assert "paper: 50000" in text
