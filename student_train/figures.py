"""The report's two figures, drawn from plain arrays: losses over the run, and each append close up.

One look throughout: colour is the norm placement (pre blue, post orange, told apart by colour-blind
readers too) and so is the marker; the line style is the curriculum (joint dashed, grow solid).
matplotlib is imported inside the functions and used without pyplot, so nothing here is global.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"pre": "#0072b2", "post": "#d55e00"}
MARKERS = {"pre": "o", "post": "s"}
STYLES = {"joint": (0, (5, 2)), "grow": "solid"}
INK, GRID = "#222222", "#bbbbbb"
WIDTH = 6.2  # inches: fonts of 10 points stay readable when a phone scales it to its width
MAX_POINTS = 1500  # per line: more cannot be seen and only swells the file


@dataclass(frozen=True)
class Curve:
    """One run for the first figure; steps are global, losses in nats per token."""

    norm: str
    curriculum: str
    label: str
    first_of_arm: bool  # only this one gets a legend entry and its raw losses
    step: np.ndarray  # [steps]
    loss: np.ndarray  # [steps]
    smooth: np.ndarray  # [steps]
    validation_step: np.ndarray  # [validations]
    validation_ce: np.ndarray  # [validations]


@dataclass(frozen=True)
class Window:
    """Training around one append of one run, relative to the mean CE just before it."""

    norm: str
    seed: int
    append: int  # the phase that it opens
    active_blocks: int  # from then on
    offset: np.ndarray  # [n], steps from the append: 0 is the last before it, 1 the first after
    excess: np.ndarray  # [n], nats per token
    smooth: np.ndarray  # [n], averaged on each side of the append alone


def training_figure(curves: Sequence[Curve], boundaries: Mapping[int, str]) -> "Figure":
    """Training loss above, validation CE below, over global steps.

    `boundaries` maps the last global step of a phase to the label of the next one. Curves without
    steps are skipped.
    """
    figure, (loss_axes, ce_axes) = _panels(2, 6.4, sharex=True)
    for curve in curves:
        if not len(curve.step):
            continue
        look = {"color": COLOURS[curve.norm], "linestyle": STYLES[curve.curriculum]}
        label = curve.label if curve.first_of_arm else None
        if curve.first_of_arm:
            loss_axes.plot(
                *_thin(curve.step, curve.loss), color=look["color"], alpha=0.25, linewidth=0.6
            )
        loss_axes.plot(*_thin(curve.step, curve.smooth), **look, linewidth=1.4, label=label)
        ce_axes.plot(
            curve.validation_step,
            curve.validation_ce,
            **look,
            marker=MARKERS[curve.norm],
            markersize=4,
            linewidth=1.2,
        )
    for axes, losses in (
        (loss_axes, [(c.step, c.smooth) for c in curves]),
        (ce_axes, [(c.validation_step, c.validation_ce) for c in curves]),
    ):
        _limit(axes, losses)
        for step, text in boundaries.items():
            axes.axvline(step, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
            if axes is loss_axes:
                _label_above(axes, step, text, slanted=len(boundaries) > 4)
    loss_axes.set_ylabel("training loss\n(nats per token)")
    ce_axes.set_ylabel("validation CE\n(nats per token)")
    ce_axes.set_xlabel("training step, over all phases")
    _legend(figure, loss_axes)
    return figure


def transition_figure(windows: Sequence[Window]) -> "Figure":
    """One panel per append: training CE minus its mean just before, over steps from the append."""
    appends = sorted({window.append for window in windows})
    figure, panels = _panels(len(appends), 1.0 + 2.5 * len(appends), sharex=False)
    for axes, append in zip(panels, appends, strict=True):
        here = [window for window in windows if window.append == append]
        named: set[str] = set()
        for window in here:
            colour = COLOURS[window.norm]
            label = None if window.norm in named else f"{window.norm} x grow"
            named.add(window.norm)
            axes.plot(*_thin(window.offset, window.excess), color=colour, alpha=0.3, linewidth=0.7)
            for side in (window.offset <= 0, window.offset > 0):
                axes.plot(
                    *_thin(window.offset[side], window.smooth[side]),
                    color=colour,
                    linewidth=1.5,
                    label=label,
                )
                label = None
        axes.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
        axes.axvline(0.5, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
        blocks = sorted({window.active_blocks for window in here})
        _label_above(axes, 0.5, f"append {append}: {_join(blocks)} blocks", slanted=False)
        axes.set_ylabel("CE above pre-append\n(nats per token)")
    panels[-1].set_xlabel("training steps from the append")
    _legend(figure, *panels)
    return figure


def svg(figure: "Figure", name: str, description: str) -> str:
    """`figure` as an <svg> element to put into a page: no prolog, no links, ids led by `name`.

    Text stays text: it can be found, and is read aloud after `description`. Equal figures give
    equal text.
    """
    import io

    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Two figures in one page would share ids such as axes_1.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    text = re.sub(r' width="[^"]*pt"', "", text, count=1)
    text = re.sub(r' height="[^"]*pt"', "", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def clipped(curves: Sequence[Curve]) -> bool:
    """Whether the first figure's axes leave out the highest losses of the first steps."""
    pairs = [(c.step, c.smooth) for c in curves]
    top = _top(pairs)
    return top is not None and any(len(y) and y.max() > top for _, y in pairs)


def _panels(count: int, height: float, sharex: bool) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = list(figure.subplots(count, 1, sharex=sharex, squeeze=False)[:, 0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.5, alpha=0.7)
        axes.tick_params(colors=INK)
        axes.margins(x=0.02)
    return figure, panels


def _legend(figure: "Figure", *panels: "Axes") -> None:
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=2,
            frameon=False,
            handlelength=3.2,
        )


def _label_above(axes: "Axes", x: float, text: str, slanted: bool) -> None:
    axes.annotate(
        text,
        (x, 1.0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if slanted else "center",
        va="bottom",
        rotation=40 if slanted else 0,
        fontsize=9,
        color=INK,
    )


def _top(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """The highest loss after each run's first tenth: its start dwarfs all that matters."""
    tops = [y[x > 0.1 * x.max()].max() for x, y in pairs if len(x) > 1]
    return float(max(tops)) if tops else None


def _limit(axes: "Axes", pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    top = _top(pairs)
    if top is None:
        return
    low = min(float(y.min()) for x, y in pairs if len(x) > 1)
    margin = 0.05 * (top - low) or 0.05
    axes.set_ylim(low - margin, top + margin)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_POINTS of a line, evenly spaced, the last always among them."""
    if len(x) <= MAX_POINTS:
        return x, y
    index = np.unique(np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int))
    return x[index], y[index]


def _join(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
