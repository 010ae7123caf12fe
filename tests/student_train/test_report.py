"""The report on synthetic run folders with planted numbers, whose answers have closed forms."""

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.errors import UsageError
from student_train import figures
from student_train.report import build_report, table_text

DOCUMENTS = 40
STEPS = 30  # of a phase
PER_STEP = 100  # targets
PAPER = {("pre", "joint"): 2.7603, ("pre", "grow"): 2.7658,
         ("post", "joint"): 2.7607, ("post", "grow"): 2.7330}  # fmt: skip
TOKENS = np.arange(10, 10 + DOCUMENTS)
HARDNESS = np.sin(np.arange(DOCUMENTS))  # cancels in every paired difference
JUMP = {"pre": 0.02, "post": 0.25}


@dataclass(frozen=True)
class Plan:
    """One synthetic run; `ce` is its final validation CE relative to HARDNESS."""

    norm: str
    curriculum: str
    ce: float
    seed: int = 0
    fingerprint: str = "cafe"
    tokens: tuple = tuple(TOKENS)
    spread: float = 0.0  # of noise per document
    stop_after: int | None = None  # steps, of the whole run
    lr: float = 0.001
    kd: bool = True

    @property
    def blocks(self):
        return [3] if self.curriculum == "joint" else [1, 2, 3]


def write_run(folder, plan):
    """A run whose training CE is `level` throughout a phase and JUMP above it right after."""
    phases = [{"index": i, "active_blocks": b, "steps": STEPS} for i, b in enumerate(plan.blocks)]
    (folder / "validation").mkdir(parents=True)
    config = {
        "norm": plan.norm, "curriculum": plan.curriculum, "seed": plan.seed, "blocks": 3,
        "layers_per_block": 3, "lr": plan.lr, "phases": phases,
        "cache": {"path": "c", "fingerprint": {"data": plan.fingerprint, "versions": plan.seed}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(plan.seed)
    lines, last = [], len(plan.blocks) - 1
    for phase in phases:
        index = phase["index"]
        jump = JUMP[plan.norm] if index else 1.0
        for step in range(STEPS + 1):
            number = index * STEPS + step
            if number > (plan.stop_after or 10**9):
                break
            level = plan.ce + 0.5 * (last - index)
            if step:
                ce = level + jump if step <= 5 and index else level
                lines.append(
                    {
                        "step": number, "phase": index, "phase_step": step,
                        "tokens": number * PER_STEP, "loss": ce + 1, "kd": 1.0, "ce": ce,
                        "lr": 0.1, "grad_norm": None, "tokens_per_s": 50.0 + (step == 1) * 1e6,
                    }
                )  # fmt: skip
            if step in (0, STEPS):
                start = level + 0.5 + jump  # the end of the phase before, and the jump
                noise = plan.spread * rng.normal(size=len(plan.tokens))
                value = (level if step else start) + HARDNESS[: len(plan.tokens)] + noise
                write_validation(folder, index, step, np.array(plan.tokens), value, plan.kd)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_validation(folder, phase, step, tokens, ce, with_kd):
    rows = np.arange(len(tokens))[::-1]  # in another order than the documents
    table = pa.table(
        {
            "phase": pa.array([phase] * len(rows), pa.int32()),
            "step": pa.array([step] * len(rows), pa.int64()),
            "document": pa.array(rows, pa.int64()),
            "tokens": pa.array(tokens[rows], pa.int64()),
            "ce_nats": pa.array((ce * tokens)[rows], pa.float64()),
            "kd_nats": pa.array(
                (0.5 * tokens)[rows] if with_kd else [None] * len(rows), pa.float64()
            ),
        }
    )
    pq.write_table(table, folder / "validation" / f"phase-{phase}-step-{step:06d}.parquet")


def write_arms(root, arms=PAPER, **kwargs):
    seed = kwargs.get("seed", 0)
    return [
        write_run(root / f"{norm}-{curriculum}-{seed}", Plan(norm, curriculum, ce, **kwargs))
        for (norm, curriculum), ce in arms.items()
    ]


def offset():
    """What HARDNESS adds to every cell."""
    return float((HARDNESS * TOKENS).sum() / TOKENS.sum())


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """The four arms with the published means: report, and the folder it was written to."""
    root = tmp_path_factory.mktemp("paper")
    runs = write_arms(root)
    return build_report(runs, root / "out"), root / "out"


def test_planted_means_are_recovered_exactly(paper):
    report, _ = paper
    for arm, ce in PAPER.items():
        assert report.cells[arm].ce == pytest.approx(ce + offset(), abs=1e-12)
        assert report.cells[arm].kd == pytest.approx(0.5)
    assert report.differences["joint"].estimate.value == pytest.approx(0.0004, abs=1e-12)
    assert report.differences["grow"].estimate.value == pytest.approx(-0.0328, abs=1e-12)
    assert report.interaction.estimate.value == pytest.approx(-0.0332, abs=1e-12)
    assert report.interaction.estimate.standard_error == pytest.approx(0, abs=1e-12)
    assert (report.documents, report.tokens) == (DOCUMENTS, TOKENS.sum())


def test_one_seed_stays_undecided_whatever_its_interval(paper):
    report, _ = paper
    assert report.interaction.estimate.excludes_zero
    assert report.verdict == "undecided"
    assert report.headline.startswith("Undecided")
    assert "-0.0332" in report.headline
    assert any("single seed" in note for note in report.notes)


def test_table_text_shows_cells_differences_and_interaction(paper):
    lines = table_text(paper[0]).splitlines()
    rows = {line.split("  ")[0]: line for line in lines}
    assert f"{2.7330 + offset():.4f}" in rows["post"]
    assert rows["post - pre"].split("  ")[1:] == [
        "+0.0004 [+0.0004, +0.0004]", "-0.0328 [-0.0328, -0.0328]",
    ]  # fmt: skip
    assert any("interaction" in line and "-0.0332 [" in line for line in lines)


def test_results_file_holds_the_numbers_as_json(paper):
    report, out = paper
    found = json.loads((out / "results.json").read_text())
    assert found["interaction"]["estimate"]["value"] == report.interaction.estimate.value
    assert found["cells"]["post-grow"]["seeds"] == [0]
    assert found["verdict"] == "undecided"
    grow = next(run for run in found["runs"] if run["curriculum"] == "grow")
    assert (grow["steps"], grow["tokens"]) == (90, 9000)
    assert grow["active_layer_tokens"] == 3000 * (3 + 6 + 9)
    assert grow["tokens_per_s"] == 50.0  # the median: an outlier per phase does not count
    joint = next(run for run in found["runs"] if run["curriculum"] == "joint")
    assert joint["active_layer_tokens"] == 3000 * 9


def test_transitions_have_the_planted_jump_and_area(paper):
    report, _ = paper
    assert [(t.norm, t.phase, t.active_blocks) for t in report.transitions] == [
        ("pre", 1, 2), ("pre", 2, 3), ("post", 1, 2), ("post", 2, 3),
    ]  # fmt: skip
    for found in report.transitions:
        jump = JUMP[found.norm]
        assert found.jump == pytest.approx(jump, abs=1e-12)
        assert found.jump_estimate.value == pytest.approx(jump, abs=1e-12)
    # 20 steps; before the second append they are all flat, after it 5 are raised, all 0.5 lower
    second = [t for t in report.transitions if t.phase == 2]
    assert [t.steps for t in second] == [20, 20]
    for found in second:
        assert found.area == pytest.approx(5 * JUMP[found.norm] / 20 - 0.5)


def test_interval_is_that_of_the_paired_documents(tmp_path):
    rng = np.random.default_rng(9)
    shift = rng.normal(0, 0.1, DOCUMENTS)
    runs = [write_run(tmp_path / n, Plan(n, "joint", 2.0)) for n in ("pre", "post")]
    ce = 2.0 + HARDNESS + shift
    write_validation(runs[1], 0, STEPS, TOKENS, ce, True)
    found = build_report(runs, tmp_path / "out").differences["joint"].estimate
    value = (shift * TOKENS).sum() / TOKENS.sum()
    square = ((shift - value) ** 2 * TOKENS**2).sum() * DOCUMENTS / (DOCUMENTS - 1)
    error = np.sqrt(square) / TOKENS.sum()
    assert found.value == pytest.approx(value)
    assert found.standard_error == pytest.approx(error)
    assert found.high - found.low == pytest.approx(2 * 2.02269 * error, rel=1e-4)  # t, 39


def test_several_seeds_are_paired_averaged_and_can_decide(tmp_path):
    shifts = {0: -0.001, 1: 0.0, 2: 0.001}
    runs = []
    for seed, shift in shifts.items():
        arms = PAPER | {("post", "grow"): PAPER[("post", "grow")] + shift}
        runs += write_arms(tmp_path, arms, seed=seed, spread=0.001)
    report = build_report(runs, tmp_path / "out")
    found = report.interaction
    assert found.seeds == (0, 1, 2)
    # one seed's noise is drawn alike in every joint, and in every grow run: it cancels
    assert found.per_seed == pytest.approx((-0.0342, -0.0332, -0.0322))
    assert found.estimate.value == pytest.approx(-0.0332)
    assert found.over_seeds.standard_error == pytest.approx(0.001 / np.sqrt(3))
    assert report.verdict == "interaction"
    assert "in favour of post-norm" in report.headline
    page = (tmp_path / "out" / "report.html").read_text()
    assert "n = 3" in page
    assert "-0.0342, -0.0332, -0.0322" in page


def test_seeds_that_disagree_leave_it_undecided(tmp_path):
    runs = []
    for seed, shift in ((0, -0.05), (1, 0.05)):
        arms = PAPER | {("post", "grow"): PAPER[("post", "grow")] + shift}
        runs += write_arms(tmp_path, arms, seed=seed)
    report = build_report(runs, tmp_path / "out")
    assert report.interaction.estimate.excludes_zero
    assert report.verdict == "undecided"


def test_differences_use_shared_seeds_only_and_say_so(tmp_path):
    runs = write_arms(tmp_path)
    runs.append(write_run(tmp_path / "more", Plan("pre", "joint", 9.0, seed=1)))
    report = build_report(runs, tmp_path / "out")
    assert report.cells[("pre", "joint")].seeds == (0, 1)
    assert report.differences["joint"].estimate.value == pytest.approx(0.0004, abs=1e-12)
    assert any("pre x joint: 0, 1" in note for note in report.notes)


def test_a_missing_arm_is_a_named_gap(tmp_path):
    arms = {arm: ce for arm, ce in PAPER.items() if arm != ("post", "grow")}
    report = build_report(write_arms(tmp_path, arms), tmp_path / "out")
    assert report.gaps == ("no run of post x grow",)
    assert report.interaction is None
    assert report.differences["grow"] is None
    assert report.differences["joint"].estimate.value == pytest.approx(0.0004, abs=1e-12)
    assert report.verdict == "unanswered"
    for text in (table_text(report), (tmp_path / "out" / "report.html").read_text()):
        assert "no run of post x grow" in text
        assert "not available" in text
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["interaction"] is None
    assert found["cells"]["post-grow"] is None


@pytest.mark.parametrize("stop_after", [0, 10, 31, 89])
def test_an_incomplete_run_is_named_and_left_out(tmp_path, stop_after):
    arms = {arm: ce for arm, ce in PAPER.items() if arm != ("post", "grow")}
    runs = write_arms(tmp_path, arms)
    plan = Plan("post", "grow", 1.0, stop_after=stop_after or 1)
    runs.append(write_run(tmp_path / "stopped", plan))
    if not stop_after:  # killed before its first validation and step
        for path in [*(runs[-1] / "validation").iterdir(), runs[-1] / "metrics.jsonl"]:
            path.unlink()
    report = build_report(runs, tmp_path / "out")
    assert report.gaps == ("no complete run of post x grow",)
    assert report.cells[("post", "grow")] is None
    assert any("stopped" in note and "incomplete" in note for note in report.notes)


def test_runs_of_different_caches_are_refused(tmp_path):
    runs = write_arms(tmp_path)
    runs[2] = write_run(tmp_path / "foreign", Plan("post", "joint", 2.0, fingerprint="f00d"))
    with pytest.raises(UsageError, match="different caches") as caught:
        build_report(runs, tmp_path / "out")
    for part in (str(runs[0]), str(runs[2]), "cafe", "f00d"):
        assert part in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokens", [tuple(TOKENS[:-1]), tuple(TOKENS[:-1]) + (99,)])
def test_runs_on_different_documents_are_refused(tmp_path, tokens):
    runs = [
        write_run(tmp_path / "one", Plan("pre", "joint", 2.0)),
        write_run(tmp_path / "two", Plan("post", "joint", 2.0, tokens=tokens)),
    ]
    with pytest.raises(UsageError, match="different documents") as caught:
        build_report(runs, tmp_path / "out")
    assert str(runs[0]) in caught.value.message
    assert str(runs[1]) in caught.value.message


def test_the_same_arm_and_seed_twice_is_refused(tmp_path):
    runs = [write_run(tmp_path / name, Plan("pre", "joint", 2.0)) for name in ("one", "two")]
    with pytest.raises(UsageError, match="both pre x joint, seed 0") as caught:
        build_report(runs, tmp_path / "out")
    assert str(runs[0]) in caught.value.message
    assert str(runs[1]) in caught.value.message


def test_nothing_to_report_on_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no runs"):
        build_report([], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        build_report([tmp_path], tmp_path / "file")


def test_settings_that_differ_are_named(tmp_path):
    runs = [
        write_run(tmp_path / "one", Plan("pre", "joint", 2.0, lr=0.001)),
        write_run(tmp_path / "two", Plan("post", "joint", 2.0, lr=0.004)),
    ]
    report = build_report(runs, tmp_path / "out")
    assert any("differ in lr" in note for note in report.notes)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "0.004 (post x joint, seed 0)" in page


def test_runs_without_a_teacher_have_no_kd(tmp_path):
    run = write_run(tmp_path / "run", Plan("pre", "joint", 2.0, kd=False))
    report = build_report([run], tmp_path / "out")
    assert report.cells[("pre", "joint")].kd is None


class Page(HTMLParser):
    """Tags, attributes that load something, and ids of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.ids, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(paper):
    text = (paper[1] / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 2
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in text
    assert "<metadata" not in text
    assert "url(http" not in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert paper[0].headline in text
    for label in ("phase 1: 2 blocks", "phase 2: 3 blocks", "append 2: 3 blocks", "CE above"):
        assert label in text
    assert "cache.fingerprint.data" in text


def test_figures_get_boundaries_and_validations_at_their_global_steps(tmp_path, monkeypatch):
    calls = []
    draw = figures.training_figure
    monkeypatch.setattr(figures, "training_figure", lambda *a: calls.append(a) or draw(*a))
    build_report(write_arms(tmp_path), tmp_path / "out")
    [(curves, boundaries)] = calls
    assert boundaries == {30: "phase 1: 2 blocks", 60: "phase 2: 3 blocks"}
    grow = next(c for c in curves if (c.norm, c.curriculum) == ("post", "grow"))
    assert grow.validation_step.tolist() == [0, 30, 30, 60, 60, 90]
    assert grow.validation_ce[-1] == pytest.approx(PAPER[("post", "grow")] + offset())
    # the mean starts anew at an append: there it is the raw loss, 1 above the CE
    assert grow.smooth[[30, 60]] == pytest.approx([2.733 + 0.5 + 0.25 + 1, 2.733 + 0.25 + 1])


def test_texts_from_a_run_are_escaped(tmp_path):
    plan = Plan("pre", "joint", 2.0, fingerprint="<script>x</script>")
    build_report([write_run(tmp_path / "a<b", plan)], tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in text
    assert "a<b" not in text


def test_the_same_runs_give_the_same_bytes(paper, tmp_path):
    runs = [run.path for run in paper[0].runs]
    build_report(runs[::-1], tmp_path)
    for name in ("report.html", "results.json"):
        assert (tmp_path / name).read_bytes() == (paper[1] / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json"]
