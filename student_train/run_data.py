"""Reading finished run folders back as arrays, and refusing sets of runs that cannot be compared.

Training writes a run folder with torch at hand; a report must open many of them without it. The
format is described in `student_train.runfolder`; unknown keys are kept and ignored.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import DamagedError, UsageError, differences

NORMS = ("pre", "post")
CURRICULA = ("joint", "grow")
VALIDATION_NAME = re.compile(r"phase-(\d+)-step-(\d+)\.parquet")
METRICS = ("step", "phase", "phase_step", "tokens", "loss", "ce", "tokens_per_s")


@dataclass(frozen=True)
class PhaseSpan:
    """One phase of a run; `first_step` counts the steps before it, `layers` the active ones."""

    index: int
    active_blocks: int
    layers: int
    steps: int
    first_step: int


@dataclass(frozen=True)
class Training:
    """metrics.jsonl as columns [steps]: counts, nats per token, and tokens per second."""

    step: np.ndarray  # int64, 1-based over the run
    phase: np.ndarray  # int64
    phase_step: np.ndarray  # int64, 1-based
    tokens: np.ndarray  # int64, targets since the start of the run
    loss: np.ndarray  # float64
    ce: np.ndarray  # float64
    tokens_per_s: np.ndarray  # float64, nan where it is not known


@dataclass(frozen=True)
class Validation:
    """Sums over each document's targets at one step of a phase, in document order."""

    phase: int
    step: int  # within the phase; 0: before its first step
    document: np.ndarray  # int64 [documents]
    tokens: np.ndarray  # int64 [documents]
    ce_nats: np.ndarray  # float64 [documents]
    kd_nats: np.ndarray | None  # float64 [documents]; None without a teacher

    @property
    def ce(self) -> float:
        """Cross-entropy, nats per token."""
        return float(self.ce_nats.sum() / self.tokens.sum())

    @property
    def kd(self) -> float | None:
        """Distillation loss, nats per token."""
        return None if self.kd_nats is None else float(self.kd_nats.sum() / self.tokens.sum())


@dataclass(frozen=True)
class Run:
    """One run as it lies on disk. `validations` are in order of (phase, step)."""

    path: Path
    norm: str
    curriculum: str
    seed: int
    phases: tuple[PhaseSpan, ...]
    training: Training
    validations: tuple[Validation, ...]
    config: dict[str, Any]

    @property
    def arm(self) -> tuple[str, str]:
        """Norm placement and curriculum: the cell of the 2 x 2 table."""
        return self.norm, self.curriculum

    @property
    def name(self) -> str:
        """Arm and seed, for people."""
        return f"{self.norm} x {self.curriculum}, seed {self.seed}"

    @property
    def final(self) -> Validation | None:
        """Validation at the last phase's last step; None where the run has not come so far."""
        return self.at(self.phases[-1].index, self.phases[-1].steps)

    def at(self, phase: int, step: int) -> Validation | None:
        """Validation at `step` of `phase`, if there is one."""
        found = [v for v in self.validations if (v.phase, v.step) == (phase, step)]
        return found[0] if found else None

    def phase_tokens(self) -> dict[int, int]:
        """Targets trained on per phase."""
        seen, tokens = 0, {}
        for span in self.phases:
            counts = self.training.tokens[self.training.phase == span.index]
            end = int(counts.max()) if len(counts) else seen
            tokens[span.index] = end - seen
            seen = end
        return tokens

    def active_layer_tokens(self) -> int:
        """Sum over phases of the phase's tokens x its active layers: what the run has cost."""
        tokens = self.phase_tokens()
        return sum(tokens[span.index] * span.layers for span in self.phases)


def load_run(path: Path) -> Run:
    """Read a run folder, finished or not.

    Raises UsageError if `path` holds no run, and DamagedError if a file of it cannot be read, lacks
    what it must hold, or contradicts another.
    """
    path = Path(path)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise UsageError(
            f"{path} holds no run (no config.json): give folders that student-train run wrote"
        )
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        norm, curriculum, seed = config["norm"], config["curriculum"], int(config["seed"])
        phases = _phases(config)
        fingerprint = config["cache"]["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(config_path, error) from None
    if norm not in NORMS or curriculum not in CURRICULA:
        raise UsageError(
            f"{config_path}: found the arm {norm} x {curriculum}, expected one of {NORMS} x "
            f"{CURRICULA}: leave this run out"
        )
    if not phases or not isinstance(fingerprint, dict):
        raise DamagedError(f"{config_path} is damaged: found no phases or no cache fingerprint")
    run = Run(
        path=path,
        norm=norm,
        curriculum=curriculum,
        seed=seed,
        phases=phases,
        training=_training(path / "metrics.jsonl"),
        validations=_validations(path / "validation"),
        config=config,
    )
    _check_steps(run)
    return run


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UsageError, naming two runs, unless all can stand in one table.

    They must be distinct in arm and seed, come from one cache (library versions aside), and have
    validated the same documents with the same target counts.
    """
    from shared.shardfile import identity

    seen: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        other = seen.setdefault((*run.arm, run.seed), run)
        if other is not run:
            raise UsageError(f"{other.path} and {run.path} are both {run.name}: give one of them")
    first = runs[0]
    expected = identity(first.config["cache"]["fingerprint"])
    for run in runs[1:]:
        found = identity(run.config["cache"]["fingerprint"])
        if found != expected:
            raise UsageError(
                f"{run.path} and {first.path} were trained from different caches:\n"
                + differences(found, expected)
                + "\nreport on runs of one cache at a time"
            )
    checked = [run for run in runs if run.validations]
    for run in checked[1:]:
        mine, theirs = run.validations[0], checked[0].validations[0]
        if not _same_documents(mine, theirs):
            raise UsageError(
                f"{run.path} and {checked[0].path} validated different documents: found "
                f"{_size(mine)}, expected {_size(theirs)}: only runs on the same validation rows "
                "can be paired"
            )


def _check_steps(run: Run) -> None:
    """Raise DamagedError unless steps and validations are those that the phases promise."""
    spans, train = run.phases, run.training
    total, count = sum(span.steps for span in spans), len(train.step)
    phase = np.repeat(np.arange(len(spans)), [span.steps for span in spans])[:count]
    expected = np.arange(1, count + 1)
    if (
        count > total
        or (run.final and count != total)
        or not np.array_equal(train.step, expected)
        or not np.array_equal(train.phase, phase)
    ):
        raise DamagedError(
            f"{run.path / 'metrics.jsonl'} is damaged: found {count} lines, expected steps 1 to "
            f"{total}, each once and in order{', of a complete run' if run.final else ''}: copy "
            "the folder again or leave this run out"
        )
    for v in run.validations:
        if v.phase >= len(spans) or v.step > spans[v.phase].steps:
            raise DamagedError(
                f"{run.path / 'validation'} is damaged: found phase {v.phase} step {v.step}, which "
                "config.json does not have: leave this run out"
            )


def _phases(config: dict[str, Any]) -> tuple[PhaseSpan, ...]:
    spans, first = [], 0
    for index, phase in enumerate(config["phases"]):
        if phase["index"] != index:
            raise ValueError(f"found phase {phase['index']} in place of phase {index}")
        blocks, steps = int(phase["active_blocks"]), int(phase["steps"])
        layers = blocks * int(config["layers_per_block"])
        spans.append(PhaseSpan(index, blocks, layers, steps, first))
        first += steps
    return tuple(spans)


def _training(path: Path) -> Training:
    """Columns of metrics.jsonl; a torn last line, left by a kill, does not count."""
    texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            lines.append([np.nan if line[key] is None else float(line[key]) for key in METRICS])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise _damaged(path, error, f", line {number}") from None
    table = np.array(lines, dtype=np.float64).reshape(-1, len(METRICS))
    counts = [table[:, i].astype(np.int64) for i in range(4)]
    return Training(*counts, *(table[:, i] for i in range(4, len(METRICS))))


def _validations(folder: Path) -> tuple[Validation, ...]:
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    found = [_validation(path) for path in paths if VALIDATION_NAME.fullmatch(path.name)]
    for other in found[1:]:
        if not _same_documents(found[0], other):
            raise DamagedError(
                f"{folder} is damaged: phase {other.phase} step {other.step} holds {_size(other)}, "
                f"phase {found[0].phase} step {found[0].step} {_size(found[0])}: one run "
                "validates the same documents throughout"
            )
    return tuple(sorted(found, key=lambda v: (v.phase, v.step)))


def _validation(path: Path) -> Validation:
    import pyarrow as pa
    import pyarrow.parquet as pq

    phase, step = (int(number) for number in VALIDATION_NAME.fullmatch(path.name).groups())
    try:
        table = pq.read_table(path, page_checksum_verification=True).sort_by("document")
        document, tokens, ce = (
            table[name].to_numpy() for name in ("document", "tokens", "ce_nats")
        )
        kd = table["kd_nats"].to_numpy() if not table["kd_nats"].null_count else None
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise _damaged(path, error) from None
    if table["ce_nats"].null_count or not np.isfinite(ce).all() or not tokens.sum() > 0:
        raise DamagedError(f"{path} is damaged: found missing or infinite losses, or no targets")
    return Validation(phase, step, document, tokens, ce, kd)


def _same_documents(a: Validation, b: Validation) -> bool:
    return np.array_equal(a.document, b.document) and np.array_equal(a.tokens, b.tokens)


def _size(validation: Validation) -> str:
    return f"{len(validation.document)} documents with {int(validation.tokens.sum())} targets"


def _damaged(path: Path, error: Exception, place: str = "") -> DamagedError:
    what = f"no {error}" if isinstance(error, KeyError) else str(error)
    return DamagedError(
        f"{path}{place} is damaged ({what}): copy the folder again or leave this run out"
    )
