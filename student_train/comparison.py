"""What several runs say together: the 2 x 2 table, the interaction, and each append's transition.

Everything here is computed from loaded runs and nothing is written, so the numbers of the report
can be used and tested without a page around them. Runs are paired: the same seed in every cell of
a difference, the same documents in every cell. Only scheduled end points count, never a best one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import UsageError
from student_train.config import FREE_SETTINGS
from student_train.run_data import CURRICULA, NORMS, PhaseSpan, Run, check_comparable
from student_train.stats import (
    Estimate,
    append_jump,
    area_above,
    interaction,
    interaction_of_means,
    mean_ce,
    mean_over_seeds,
    paired_difference,
)

AREA_SHARE = 0.02  # of the phase after an append: the paper's 1 000 of 50 000 steps
AREA_STEPS = 20  # at least, where a phase is short
# Keys that name the arm, follow from others, or change how a run is computed but not what.
NO_SETTING = {
    "norm", "curriculum", "seed", "phases", "cache", "versions", "deepspeed_config",
    *FREE_SETTINGS,
}  # fmt: skip

Arm = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """Final validation losses of one arm, nats per token, averaged over its seeds."""

    ce: float
    kd: float | None
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Contrast:
    """A difference between cells over the seeds that all of them have, nats per token.

    `estimate` averages over seeds and its interval covers documents; `over_seeds` is the t
    interval of the values per seed, None for a single one.
    """

    estimate: Estimate
    seeds: tuple[int, ...]
    per_seed: tuple[float, ...]
    over_seeds: Estimate | None

    @property
    def decided(self) -> bool:
        """Whether both the interval over documents and the one over seeds exclude zero."""
        return (
            self.estimate.excludes_zero
            and self.over_seeds is not None
            and self.over_seeds.excludes_zero
        )


@dataclass(frozen=True)
class Transition:
    """One append of one run. Losses in nats per token; None where the run has not come so far."""

    run: str
    norm: str
    seed: int
    phase: int  # the phase that it opens
    active_blocks: int
    jump: float | None  # validation CE at step 0 minus that at the end of the previous phase
    jump_estimate: Estimate | None  # the same with its interval over the paired documents
    level: float | None  # mean training CE of the last `steps` steps before
    area: float | None  # mean excess over it in the first `steps` steps after
    steps: int


@dataclass(frozen=True)
class Report:
    """The answer and all that it rests on.

    `verdict`: "unanswered" (a cell is missing), "undecided", or "interaction". `gaps` and `notes`
    are sentences for people. `fingerprint`: that of the cache all runs share.
    """

    headline: str
    verdict: str
    cells: dict[Arm, Cell | None]
    differences: dict[str, Contrast | None]  # by curriculum: post - pre
    interaction: Contrast | None
    transitions: tuple[Transition, ...]
    runs: tuple[Run, ...]  # in order of arm and seed, incomplete ones too
    gaps: tuple[str, ...]
    notes: tuple[str, ...]
    documents: int
    tokens: int
    fingerprint: dict[str, Any]


def analyse(runs: Sequence[Run]) -> Report:
    """Compare `runs`. Raises UsageError if they cannot be compared, or there is none."""
    if not runs:
        raise UsageError("found no runs to report on: give one or more run folders")
    check_comparable(runs)
    order = sorted(runs, key=lambda r: (NORMS.index(r.norm), CURRICULA.index(r.curriculum), r.seed))
    complete = {(*run.arm, run.seed): run for run in order if run.final}
    arms = [(norm, curriculum) for norm in NORMS for curriculum in CURRICULA]
    tokens = next((run.validations[0].tokens for run in order if run.validations), np.zeros(0))
    if complete and np.count_nonzero(tokens) < 2:
        raise UsageError(
            f"found {np.count_nonzero(tokens)} validation document(s), expected 2 or more: "
            "intervals count documents; make a cache with more validation rows"
        )
    cells = {arm: _cell(arm, complete) for arm in arms}
    differences = {c: _contrast([("pre", c), ("post", c)], complete, tokens) for c in CURRICULA}
    both = _contrast(arms, complete, tokens)
    gaps = _gaps(cells, order, both)
    documents = int(np.count_nonzero(tokens))
    return Report(
        headline=_headline(both, gaps, documents),
        verdict="unanswered" if both is None else "interaction" if both.decided else "undecided",
        cells=cells,
        differences=differences,
        interaction=both,
        transitions=tuple(
            transition(run, span) for run in order for span in run.phases if span.index > 0
        ),
        runs=tuple(order),
        gaps=gaps,
        notes=_notes(order, both),
        documents=documents,
        tokens=int(tokens.sum()),
        fingerprint=order[0].config["cache"]["fingerprint"],
    )


def transition(run: Run, span: PhaseSpan) -> Transition:
    """The append that opens phase `span` of `run`."""
    previous = run.phases[span.index - 1]
    steps = area_steps(run, span)
    before, after = around_append(run, span, steps, steps)
    level = float(before.mean()) if len(before) == steps else None
    ends = run.at(previous.index, previous.steps), run.at(span.index, 0)
    jump = estimate = None
    if all(ends):
        jump = append_jump(ends[0].ce, ends[1].ce)
        if np.count_nonzero(ends[0].tokens) > 1:
            estimate = paired_difference(ends[0].ce_nats, ends[1].ce_nats, ends[0].tokens)
    return Transition(
        run=run.name,
        norm=run.norm,
        seed=run.seed,
        phase=span.index,
        active_blocks=span.active_blocks,
        jump=jump,
        jump_estimate=estimate,
        level=level,
        area=area_above(after, level) if level is not None and len(after) == steps else None,
        steps=steps,
    )


def area_steps(run: Run, span: PhaseSpan) -> int:
    """Steps on each side of an append that its level and its area average over."""
    previous = run.phases[span.index - 1]
    wanted = max(AREA_STEPS, round(AREA_SHARE * span.steps))
    return min(wanted, span.steps, previous.steps)


def around_append(
    run: Run, span: PhaseSpan, before: int, after: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training CE of the last `before` steps before phase `span` and of its first `after` ones."""
    train, first = run.training, span.first_step
    tail = (train.step > first - before) & (train.step <= first)
    head = (train.step > first) & (train.step <= first + after)
    return train.ce[tail & (train.phase == span.index - 1)], train.ce[head]


def settings(run: Run) -> dict[str, str]:
    """What shaped the run's numbers besides arm, seed and cache: dotted keys, values as JSON."""
    return flatten({k: v for k, v in run.config.items() if k not in NO_SETTING})


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested keys dotted, values as JSON; a text stays as it is."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def signed(value: float) -> str:
    """Four decimals with a sign: +0.0004."""
    return f"{value:+.4f}"


def _cell(arm: Arm, complete: dict[tuple[str, str, int], Run]) -> Cell | None:
    runs = [run for run in complete.values() if run.arm == arm]
    if not runs:
        return None
    kds = [run.final.kd for run in runs]
    return Cell(
        ce=float(np.mean([run.final.ce for run in runs])),
        kd=None if None in kds else float(np.mean(kds)),
        seeds=tuple(run.seed for run in runs),
    )


def _contrast(
    arms: Sequence[Arm], complete: dict[tuple[str, str, int], Run], tokens: np.ndarray
) -> Contrast | None:
    """post - pre of two cells, or the interaction of four in the order of the table by rows."""
    seeds = [{run.seed for run in complete.values() if run.arm == arm} for arm in arms]
    common = sorted(set.intersection(*seeds))
    if not common:
        return None
    nats = np.array([[complete[(*arm, seed)].final.ce_nats for seed in common] for arm in arms])
    means = nats.mean(axis=1)
    if len(arms) == 2:
        estimate = paired_difference(*means, tokens)
        values = [paired_difference(*nats[:, i], tokens).value for i in range(len(common))]
    else:
        estimate = interaction(*means, tokens)
        values = [
            interaction_of_means(*(mean_ce(cell, tokens) for cell in nats[:, i]))
            for i in range(len(common))
        ]
    over_seeds = mean_over_seeds(values) if len(values) > 1 else None
    return Contrast(estimate, tuple(common), tuple(values), over_seeds)


def _gaps(
    cells: dict[Arm, Cell | None], runs: Sequence[Run], both: Contrast | None
) -> tuple[str, ...]:
    present = {run.arm for run in runs}
    gaps = [
        f"no {'complete ' if arm in present else ''}run of {arm[0]} x {arm[1]}"
        for arm, cell in cells.items()
        if cell is None
    ]
    if not gaps and both is None:
        gaps = ["no seed that all four arms share"]
    return tuple(gaps)


def _notes(runs: Sequence[Run], both: Contrast | None) -> tuple[str, ...]:
    notes = [
        f"{run.path} ({run.name}) is incomplete and left out of the table: it has no validation at "
        f"the last step of phase {run.phases[-1].index}"
        for run in runs
        if not run.final
    ]
    arms = {run.arm for run in runs if run.final}
    seeds = {arm: {run.seed for run in runs if run.final and run.arm == arm} for arm in arms}
    if len({frozenset(group) for group in seeds.values()}) > 1:
        text = "; ".join(f"{a} x {b}: {_list(seeds[(a, b)])}" for a, b in sorted(seeds))
        notes.append(f"the arms have different seeds ({text}): differences use the shared ones")
    flat = [settings(run) for run in runs if run.final]
    keys = sorted({key for values in flat for key in values})
    differing = [key for key in keys if len({values.get(key) for values in flat}) > 1]
    if differing:
        notes.append(
            f"the runs also differ in {', '.join(differing)} (see the configuration): the "
            "differences between arms include what that did"
        )
    if both is not None and both.over_seeds is None:
        notes.append(
            "a single seed: the intervals cover the choice of documents, not of seeds, so the "
            "verdict is undecided whatever they exclude"
        )
    return tuple(notes)


def _headline(both: Contrast | None, gaps: Sequence[str], documents: int) -> str:
    if both is None:
        return (
            "Unanswered: whether norm placement and depth growth interact cannot be computed, "
            f"there is {', '.join(gaps)}."
        )
    found = both.estimate
    intervals = f"95 % interval {signed(found.low)} to {signed(found.high)} over {documents} "
    intervals += "documents"
    if both.over_seeds:
        seeds = both.over_seeds
        intervals += f"; {signed(seeds.low)} to {signed(seeds.high)} over {len(both.seeds)} seeds"
    move = (
        "growing instead of training jointly moves the post - pre difference in validation CE by "
        f"{signed(found.value)} nats per token ({intervals})"
    )
    if both.decided:
        favours = "post" if found.value < 0 else "pre"
        return f"Norm placement and depth growth interact, in favour of {favours}-norm: {move}."
    if both.over_seeds is None:
        return f"Undecided: {move}, but one seed cannot tell this from chance between seeds."
    return f"Undecided: {move}, and not both intervals exclude zero."


def _list(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
