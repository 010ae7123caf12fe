"""A run's folder: what is in it, what it may continue, and its commits.

    RUN/
      config.json        the settings as used; a run continues only under the same
      metrics.jsonl      one line per step
      validation/        losses per document: phase-P-step-SSSSSS.parquet
      checkpoints/       ZeRO checkpoint sets, and manifest.json: the last one that is complete
      export/phase-P/    safetensors weights, config, tokenizer

A checkpoint counts once the manifest names it: the manifest is written last, atomically. What lies
beyond it was left by a killed process; it is cut off and made again.
"""

import fcntl
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.errors import DamagedError, UsageError, differences
from shared.files import atomic_write_text, fsync
from student_train.config import FREE_SETTINGS


@dataclass(frozen=True)
class Position:
    """How far a run has come. `step` counts within `phase`; `done`: the phase is closed."""

    phase: int
    step: int
    done: bool
    tag: str | None
    world: int
    tokens: int  # targets trained on since the start of the run


START = Position(phase=0, step=0, done=False, tag=None, world=0, tokens=0)


class RunFolder:
    """The folder of one run. Only rank 0 writes through it; every rank reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        self._manifest = self.checkpoints / "manifest.json"

    def check(self, config: dict[str, Any]) -> None:
        """Refuse a folder that holds anything but a run with this very config."""
        path = self.path / "config.json"
        if not self.path.exists():
            return
        if not self.path.is_dir() or (not path.is_file() and any(self._contents())):
            raise UsageError(f"{self.path} exists and holds no run: give --out a new folder")
        if not path.is_file():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DamagedError(f"{path} is damaged ({error})") from None
        expected = json.loads(json.dumps(config))
        if _identity(found) != _identity(expected):
            raise DamagedError(
                f"{self.path} holds another run, nothing was changed:\n"
                + differences(_identity(found), _identity(expected))
                + "\ngive --out a new folder, or the options of the run that is there"
            )

    def start(self, config: dict[str, Any]) -> None:
        """Create the folder, or cut an interrupted run back to its last commit.

        Raises UsageError if another process is training into it.
        """
        self._lock()
        if not (self.path / "config.json").is_file():
            atomic_write_text(self.path / "config.json", json.dumps(config, indent=1) + "\n")
        self.checkpoints.mkdir(exist_ok=True)
        position = self.position()
        if self._metrics.is_file():
            kept = [line for line in self._lines() if _at_most(line, position)]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            atomic_write_text(self._metrics, text)
        for path in self.path.glob("validation/phase-*-step-*.parquet"):
            phase, step = (int(part) for part in re.findall(r"\d+", path.stem))
            if (phase, step) > (position.phase, position.step):
                path.unlink()
        self._drop_all_but(position)

    def _lock(self) -> None:
        """Hold the folder until this process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            raise UsageError(
                f"another process is training into {self.path}: wait for it, or give another --out"
            ) from None

    def _contents(self) -> list[Path]:
        """What is in the folder, but for what a killed process was just writing."""
        return [path for path in self.path.iterdir() if not path.name.startswith(".tmp-")]

    def position(self) -> Position:
        """The last committed position. Raises DamagedError for an unreadable manifest."""
        if not self._manifest.is_file():
            return START
        try:
            return Position(**json.loads(self._manifest.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DamagedError(f"{self._manifest} is damaged ({error})") from None

    def commit(self, position: Position) -> None:
        """Make `position` the one to resume from; drop checkpoints inside phases before it."""
        for file in (self.checkpoints / position.tag).iterdir():
            fsync(file)  # DeepSpeed does not, and the manifest must not outlive what it names
        for path in (self.checkpoints / position.tag, self.checkpoints, self._metrics):
            fsync(path)
        atomic_write_text(self._manifest, json.dumps(asdict(position), indent=1) + "\n")
        self._drop_all_but(position)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add one step to metrics.jsonl."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def validation(self, phase: int, step: int) -> Path:
        return self.path / "validation" / f"phase-{phase}-step-{step:06d}.parquet"

    def export(self, phase: int) -> Path:
        return self.path / "export" / f"phase-{phase}"

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for text in self._metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # the line that was being written at a kill
                break
        return lines

    def _drop_all_but(self, position: Position) -> None:
        """Keep one checkpoint set per finished phase, and the one to resume from."""
        keep = {phase_tag(p) for p in range(position.phase + position.done)} | {position.tag}
        for folder in self.checkpoints.iterdir():
            if folder.is_dir() and folder.name not in keep:
                shutil.rmtree(folder)


def phase_tag(phase: int) -> str:
    """Name of the checkpoint set that closes a phase."""
    return f"phase-{phase}-end"


def step_tag(phase: int, step: int) -> str:
    """Name of a checkpoint set inside a phase."""
    return f"phase-{phase}-step-{step:06d}"


def _at_most(line: dict[str, Any], position: Position) -> bool:
    return (line["phase"], line["phase_step"]) <= (position.phase, position.step)


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """Versions, free settings and the cache's place may change between starts; no more."""
    free = ("versions", *FREE_SETTINGS)
    kept = {key: value for key, value in config.items() if key not in free}
    fingerprint = {k: v for k, v in config["cache"]["fingerprint"].items() if k != "versions"}
    return kept | {"cache": {"fingerprint": fingerprint}}
