"""A run's folder: who may write to it, what a new start cuts off, what it refuses to read."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from launching import ROOT, SMALL, launch

from shared.errors import DamagedError
from student_train.export import load_student
from student_train.runfolder import START, Position, RunFolder

MIDDLE = Position(phase=1, step=4, done=False, tag="phase-1-step-000004", world=1, tokens=9)


def planted(folder):
    """A folder that was killed after the commit of MIDDLE, in the middle of writing more."""
    for tag in ("phase-0-end", MIDDLE.tag, "phase-1-step-000008"):
        (folder / "checkpoints" / tag).mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "checkpoints" / "manifest.json").write_text(json.dumps(asdict(MIDDLE)))
    steps = [(0, 1), (0, 8), (1, 1), (1, 4), (1, 5)]
    lines = [json.dumps({"phase": phase, "phase_step": step}) + "\n" for phase, step in steps]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"phase": 1, "pha')
    (folder / "validation").mkdir()
    for phase, step in [(0, 0), (0, 8), (1, 0), (1, 4), (1, 6), (2, 0)]:
        RunFolder(folder).validation(phase, step).touch()
    return folder


def test_a_start_cuts_off_what_lies_beyond_the_last_commit(tmp_path):
    folder = planted(tmp_path / "run")
    RunFolder(folder).start({})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(x["phase"], x["phase_step"]) for x in lines] == [(0, 1), (0, 8), (1, 1), (1, 4)]
    assert sorted(path.stem for path in (folder / "validation").iterdir()) == [
        "phase-0-step-000000",
        "phase-0-step-000008",
        "phase-1-step-000000",
        "phase-1-step-000004",
    ]
    tags = {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()}
    assert tags == {"phase-0-end", MIDDLE.tag}


def test_without_a_commit_everything_starts_again(tmp_path):
    folder = planted(tmp_path / "run")
    (folder / "checkpoints" / "manifest.json").unlink()
    RunFolder(folder).start({})
    assert RunFolder(folder).position() == START
    assert (folder / "metrics.jsonl").read_text() == ""
    assert not [path for path in (folder / "checkpoints").iterdir() if path.is_dir()]


def test_two_processes_cannot_train_into_one_folder(cache_dir, tmp_path):
    out = tmp_path / "run"
    hold = (
        "import sys, time; from pathlib import Path\n"
        "from student_train.runfolder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]))\n"
        "folder.start({}); print('held', flush=True); time.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", hold, out], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        (out / "config.json").unlink()
        shutil.rmtree(out / "checkpoints")
        refused = launch("python", ["--cache", cache_dir, "--out", out])
        assert refused.returncode == 2, refused.stdout
        assert f"another process is training into {out}" in refused.stdout
        assert list(out.iterdir()) == []
    finally:
        other.kill()  # -9: the kernel gives the folder back
        other.wait()
    RunFolder(out).start({})
    assert (out / "config.json").is_file()


def test_ranks_that_see_different_folders_stop(grown, cache_dir, tmp_path):
    shutil.copytree(grown, tmp_path / "run-0")
    shutil.copytree(grown, tmp_path / "run-1")
    path = tmp_path / "run-0" / "checkpoints" / "manifest.json"
    position = json.loads(path.read_text())
    path.write_text(json.dumps(position | {"phase": 0, "tag": "phase-0-end"}))
    (tmp_path / "run-1" / "checkpoints" / "manifest.json").unlink()
    student = f"exec {sys.executable} {ROOT / 'launch' / 'student.py'} {' '.join(SMALL)}"
    command = f"{student} --norm post --cache {cache_dir} --out {tmp_path}/run-$RANK"
    torchrun = Path(sys.executable).parent / "torchrun"
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc_per_node", "2", "--no-python", "bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert "the ranks find different states of" in done.stdout + done.stderr


def test_a_damaged_manifest_is_named(tmp_path):
    folder = planted(tmp_path / "run")
    (folder / "checkpoints" / "manifest.json").write_text('{"phase": 1')
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        RunFolder(folder).position()


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_damaged_weights_are_named(harm, grown, tmp_path):
    export = shutil.copytree(grown / "export" / "phase-1", tmp_path / "export")
    path = export / "model.safetensors"
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    with pytest.raises(DamagedError, match=r"model\.safetensors is damaged or missing"):
        load_student(export)
