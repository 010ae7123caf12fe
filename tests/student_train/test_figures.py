"""The figures: every line where its numbers say, in the look that the legend promises."""

import numpy as np

from student_train import figures


def curve(norm, curriculum, loss):
    step = np.arange(1, len(loss) + 1)
    return figures.Curve(
        norm, curriculum, f"{norm} x {curriculum}", True, step, loss, loss, step[-1:], loss[-1:]
    )


def test_training_figure_draws_boundaries_where_they_are_and_keeps_the_look():
    loss = np.linspace(9, 3, 90)
    drawing = figures.training_figure(
        [curve("pre", "joint", loss), curve("post", "grow", loss)], {30: "one", 60: "two"}
    )
    for axes in drawing.axes:
        uprights = [line.get_xdata() for line in axes.lines if len(set(line.get_xdata())) == 1]
        assert [list(x) for x in uprights if x[0] in (30, 60)] == [[30, 30], [60, 60]]
    assert [text.get_text() for text in drawing.axes[0].texts] == ["one", "two"]
    looks = {line.get_label(): line for line in drawing.axes[0].lines}
    assert looks["pre x joint"].get_color() == figures.COLOURS["pre"]
    assert looks["post x grow"].get_color() == figures.COLOURS["post"]
    assert looks["pre x joint"].is_dashed()
    assert not looks["post x grow"].is_dashed()
    assert all("nats per token" in axes.get_ylabel() for axes in drawing.axes)


def test_long_runs_do_not_swell_the_page():
    loss = np.random.default_rng(0).normal(3, 1, 100_000)
    drawing = figures.training_figure([curve("pre", "joint", loss)], {})
    assert len(figures.svg(drawing, "x", "y")) < 200_000
    assert drawing.axes[0].lines[-1].get_xdata()[-1] == 100_000


def test_transition_figure_has_a_panel_per_append_and_breaks_its_lines_there():
    offset = np.arange(-4, 11)
    windows = [
        figures.Window(norm, 0, append, append + 1, offset, offset * 0.1, offset * 0.2)
        for norm in ("pre", "post")
        for append in (1, 2)
    ]
    drawing = figures.transition_figure(windows)
    titles = [axes.texts[0].get_text() for axes in drawing.axes]
    assert titles == ["append 1: 2 blocks", "append 2: 3 blocks"]
    strong = [line for line in drawing.axes[0].lines if line.get_linewidth() == 1.5]
    assert [list(line.get_xdata()[[0, -1]]) for line in strong] == [[-4, 0], [1, 10]] * 2
    assert [line.get_color() for line in strong[::2]] == list(figures.COLOURS.values())
    assert [text.get_text() for text in drawing.legends[0].texts] == ["pre x grow", "post x grow"]


def test_the_start_of_a_run_does_not_set_the_scale():
    loss = np.concatenate([[12.0], np.full(99, 3.0)])
    loss[50] = 3.5
    curves = [curve("pre", "joint", loss)]
    low, high = figures.training_figure(curves, {}).axes[0].get_ylim()
    assert low < 3.0
    assert 3.5 < high < 4.0
    assert figures.clipped(curves)
    assert not figures.clipped([curve("pre", "joint", loss[1:])])
