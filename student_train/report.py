"""The report on several runs: report.html, results.json and a table for the terminal.

The page holds everything itself (style, SVG figures) and has no scripts, so it can be mailed,
printed and opened years later. A missing arm leaves a named gap, never an invented number.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import UsageError
from shared.files import atomic_write_text
from student_train import figures
from student_train.comparison import (
    Contrast,
    Report,
    analyse,
    area_steps,
    around_append,
    flatten,
    settings,
    signed,
)
from student_train.run_data import CURRICULA, NORMS, PhaseSpan, Run, load_run
from student_train.stats import Estimate, trailing_mean

__all__ = ["Report", "build_report", "load_run", "results", "table_text"]

RESULTS_FORMAT = 1
SMOOTH_SHARE = 0.02  # of a run's steps: the window of the trailing mean
VIEW_STEPS = 5  # the close-up shows this many times the steps that the area averages over

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #595959; --page: #ffffff;
  --line: #cccccc; --mark: #eef3f7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #b0b0b0; --page: #16181a;
  --line: #44484c; --mark: #23282d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 52rem; color: var(--ink);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.answer { font-size: 1.1rem; background: var(--mark); padding: .8rem 1rem; border-radius: .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption, figcaption { text-align: left; color: var(--soft); font-size: .85rem; padding: .3rem 0; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom-width: 2px; }
.texts td, .texts th { text-align: left; overflow-wrap: anywhere; }
small { color: var(--soft); white-space: nowrap; }
figure { margin: 1rem 0; }
.card { background: #f7f7f5; border: 1px solid var(--line); border-radius: .4rem; padding: .5rem; }
.card svg { display: block; width: 100%; min-width: 26rem; height: auto; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff;
  --line: #999; --mark: #f2f2f2; } body { max-width: none; padding: 0; font-size: 10pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; }
  .card svg { min-width: 0; } }
"""


def build_report(run_paths: Iterable[Path], out_dir: Path) -> Report:
    """Compare the runs in `run_paths`; write report.html and results.json into `out_dir`.

    Raises UsageError for paths that hold no run, runs that cannot be compared (other caches, other
    validation documents, the same arm and seed twice) or an `out_dir` that is a file, and
    DamagedError for a run that cannot be read. Then nothing is written.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise UsageError(f"{out_dir} is a file: give --out a folder")
    report = analyse([load_run(path) for path in run_paths])
    page = page_html(report)
    atomic_write_text(out_dir / "results.json", json.dumps(results(report), indent=1) + "\n")
    atomic_write_text(out_dir / "report.html", page)
    return report


def table_text(report: Report) -> str:
    """The 2 x 2 table with its intervals, the interaction, the answer, gaps and notes, as text."""
    rows = [["", *CURRICULA]]
    for norm in NORMS:
        rows.append([norm, *(_cell_text(report, norm, c) for c in CURRICULA)])
    rows.append(["post - pre", *(_contrast_text(report.differences[c]) for c in CURRICULA)])
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"final validation CE, nats per token; {report.documents} documents, "
        f"{report.tokens} targets; [95 % interval over documents]",
        "",
    ]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    lines.append(f"interaction (grow - joint of post - pre): {_contrast_text(report.interaction)}")
    lines += ["", report.headline, *(f"gap: {gap}" for gap in report.gaps)]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def results(report: Report) -> dict[str, Any]:
    """What results.json holds: every number of the report, null for what is missing."""
    return {
        "format": RESULTS_FORMAT,
        "unit": "nats per token",
        "headline": report.headline,
        "verdict": report.verdict,
        "documents": report.documents,
        "tokens": report.tokens,
        "cells": {f"{a}-{b}": c and asdict(c) for (a, b), c in report.cells.items()},
        "differences": {c: d and asdict(d) for c, d in report.differences.items()},
        "interaction": report.interaction and asdict(report.interaction),
        "transitions": [asdict(transition) for transition in report.transitions],
        "runs": [_run_results(run) for run in report.runs],
        "gaps": list(report.gaps),
        "notes": list(report.notes),
        "fingerprint": report.fingerprint,
    }


def page_html(report: Report) -> str:
    """The whole page as text."""
    items = [f"gap: {gap}" for gap in report.gaps] + list(report.notes)
    remarks = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Norm placement and depth growth</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Do norm placement and depth growth interact?</h1>
<p class="answer">{escape(report.headline)}</p>
{f"<ul>{remarks}</ul>" if remarks else ""}
<h2>Final validation cross-entropy</h2>
{_main_table(report)}
<h2>Training</h2>
{_training_section(report)}
<h2>Transitions at the appends</h2>
{_transition_section(report)}
<h2>Runs</h2>
{_runs_table(report)}
<h2>Configuration</h2>
{_configuration_table(report)}
</body>
</html>
"""


def _main_table(report: Report) -> str:
    rows = [[n, *(escape(_cell_text(report, n, c)) for c in CURRICULA)] for n in NORMS]
    rows.append(["post - pre", *(_contrast_html(report.differences[c]) for c in CURRICULA)])
    table = _table(
        ["", *CURRICULA],
        rows,
        "Nats per token, at the end of the last phase; in brackets the 95 % interval of the paired "
        f"difference, clustered by document ({report.documents} documents, {report.tokens} "
        "targets). Averages over the seeds named.",
    )
    both = report.interaction
    text = f"<p>Interaction, grow - joint of (post - pre): {_contrast_html(both)}"
    if both and both.over_seeds:
        values = ", ".join(signed(value) for value in both.per_seed)
        text += f"; per seed {values}; over seeds {_interval(both.over_seeds)}"
    return f"{table}{text}</p>"


def _training_section(report: Report) -> str:
    curves, arms = [], set()
    for run in report.runs:
        curves.append(_curve(run, first_of_arm=run.arm not in arms))
        arms.add(run.arm)
    labels: dict[int, set[str]] = {}
    for run in report.runs:
        for span in run.phases[1:]:
            text = f"phase {span.index}: {span.active_blocks} blocks"
            labels.setdefault(span.first_step, set()).add(text)
    boundaries = {step: " / ".join(sorted(texts)) for step, texts in sorted(labels.items())}
    if not any(len(curve.step) for curve in curves):
        return "<p>No run has trained a step yet.</p>"
    caption = (
        "Above: training loss, faint as measured (first seed of an arm), strong its trailing mean "
        "within the phase. Below: validation CE. Dashed verticals: a phase of the grow runs begins."
    )
    if figures.clipped(curves):
        caption += " The axis leaves out higher losses of the first steps."
    drawing = figures.training_figure(curves, boundaries)
    return _figure(figures.svg(drawing, "training", "Training loss and validation CE"), caption)


def _transition_section(report: Report) -> str:
    if not report.transitions:
        return "<p>No run with an append: nothing to show.</p>"
    windows = [
        window
        for run in report.runs
        for span in run.phases[1:]
        if (window := _window(run, span)) is not None
    ]
    drawing = ""
    if windows:
        drawing = _figure(
            figures.svg(
                figures.transition_figure(windows), "transition", "Training CE around each append"
            ),
            "Training CE minus its mean over the steps just before the append (0 on the axis); "
            "strong the trailing mean, apart on each side.",
        )
    rows = [
        [
            escape(item.run),
            str(item.phase),
            str(item.active_blocks),
            _gap(item.jump, signed) + _interval(item.jump_estimate),
            _gap(item.area, signed),
            str(item.steps),
        ]
        for item in report.transitions
    ]
    return drawing + _table(
        ["run", "append", "blocks after", "jump of validation CE", "area above", "steps"],
        rows,
        "Nats per token. Jump: validation CE right after the append minus right before. Area: mean "
        "excess of training CE in the first steps over its mean in as many steps before.",
    )


def _runs_table(report: Report) -> str:
    rows = []
    for run in report.runs:
        values = _run_results(run)
        rows.append(
            [
                escape(f"{run.norm} x {run.curriculum}") + ("" if run.final else " (incomplete)"),
                str(run.seed),
                " + ".join(str(span.active_blocks) for span in run.phases),
                f"{values['steps']:,}",
                f"{values['tokens']:,}",
                f"{values['active_layer_tokens']:,}",
                _gap(values["ce"], "{:.4f}".format),
                _gap(values["kd"], "{:.4f}".format),
                _gap(values["tokens_per_s"], "{:,.0f}".format),
                escape(str(run.path)),
            ]
        )
    head = ["arm", "seed", "blocks by phase", "steps", "tokens", "active-layer-tokens"]
    return _table(
        [*head, "final CE", "final KD", "tokens/s", "folder"],
        rows,
        "Active-layer-tokens: tokens of each phase times its active layers, summed: compare arms "
        "by it, not by steps. CE and KD in nats per token, tokens per second as median over steps.",
    )


def _configuration_table(report: Report) -> str:
    found: dict[str, dict[str, list[str]]] = {}
    for run in report.runs:
        for key, value in settings(run).items():
            found.setdefault(key, {}).setdefault(value, []).append(run.name)
    rows = [[escape(key), _setting(values, len(report.runs))] for key, values in found.items()]
    rows.append(["cache.path", escape(str(report.runs[0].config["cache"].get("path", "unknown")))])
    fingerprint = flatten(report.fingerprint, "cache.fingerprint.")
    rows += [[escape(key), escape(value)] for key, value in fingerprint.items()]
    return _table(["setting", "value"], rows, "Shared by all runs unless it says whose.", "texts")


def _setting(values: dict[str, list[str]], runs: int) -> str:
    if len(values) == 1 and len(next(iter(values.values()))) == runs:
        return escape(next(iter(values)))
    return "<br>".join(escape(f"{value} ({'; '.join(who)})") for value, who in values.items())


def _curve(run: Run, first_of_arm: bool) -> figures.Curve:
    train = run.training
    window = max(5, round(SMOOTH_SHARE * len(train.step)))
    # Averaging across an append would smear the jump that the figure is there to show.
    parts = [trailing_mean(train.loss[train.phase == s.index], window) for s in run.phases]
    starts = {span.index: span.first_step for span in run.phases}
    return figures.Curve(
        norm=run.norm,
        curriculum=run.curriculum,
        label=f"{run.norm} x {run.curriculum}",
        first_of_arm=first_of_arm,
        step=train.step,
        loss=train.loss,
        smooth=np.concatenate(parts),
        validation_step=np.array([starts[v.phase] + v.step for v in run.validations]),
        validation_ce=np.array([v.ce for v in run.validations]),
    )


def _window(run: Run, span: PhaseSpan) -> figures.Window | None:
    """Training around the append, or None where one side of it has no steps yet."""
    steps = area_steps(run, span)
    shown = min(VIEW_STEPS * steps, span.steps)
    before, after = around_append(run, span, steps, shown)
    if not len(before) or not len(after):
        return None
    excess = [part - before.mean() for part in (before, after)]
    window = max(3, steps // 10)
    return figures.Window(
        norm=run.norm,
        seed=run.seed,
        append=span.index,
        active_blocks=span.active_blocks,
        offset=np.arange(1 - len(before), len(after) + 1),
        excess=np.concatenate(excess),
        smooth=np.concatenate([trailing_mean(part, window) for part in excess]),
    )


def _run_results(run: Run) -> dict[str, Any]:
    speeds = run.training.tokens_per_s[np.isfinite(run.training.tokens_per_s)]
    return {
        "path": str(run.path),
        "norm": run.norm,
        "curriculum": run.curriculum,
        "seed": run.seed,
        "complete": run.final is not None,
        "phases": [asdict(span) for span in run.phases],
        "steps": len(run.training.step),
        "tokens": sum(run.phase_tokens().values()),
        "active_layer_tokens": run.active_layer_tokens(),
        "ce": run.final.ce if run.final else None,
        "kd": run.final.kd if run.final else None,
        "tokens_per_s": float(np.median(speeds)) if len(speeds) else None,
    }


def _cell_text(report: Report, norm: str, curriculum: str) -> str:
    cell = report.cells[(norm, curriculum)]
    if cell is None:
        return "no run"
    return f"{cell.ce:.4f} (n = {len(cell.seeds)})"


def _contrast_text(contrast: Contrast | None) -> str:
    if contrast is None:
        return "not available"
    found = contrast.estimate
    return f"{signed(found.value)} [{signed(found.low)}, {signed(found.high)}]"


def _contrast_html(contrast: Contrast | None) -> str:
    if contrast is None:
        return "not available"
    count = f" <small>n = {len(contrast.seeds)}</small>"
    return f"{signed(contrast.estimate.value)}{_interval(contrast.estimate)}{count}"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f" <small>[{signed(estimate.low)}, {signed(estimate.high)}]</small>"


def _gap(value: float | None, form: Any) -> str:
    return "not available" if value is None else form(value)


def _figure(drawing: str, caption: str) -> str:
    return (
        f'<figure><div class="card wide">{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _table(head: Sequence[str], rows: list[list[str]], caption: str, kind: str = "") -> str:
    """Cells of `rows` are HTML already; `head` and `caption` are plain text."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )
