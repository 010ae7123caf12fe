"""Settings: precedence, types, and messages that name the key."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from shared.config import load_preset, preset_names, resolve, setting, setting_options
from shared.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Small:
    rows: int = setting("Number of rows.")
    rate: float = setting("Rate.")
    kind: Literal["a", "b"] = setting("Kind.")
    limit: int | None = setting("Limit.")
    fast: bool = setting("Fast.")


@pytest.fixture
def preset(tmp_path):
    def write(text):
        path = tmp_path / "own.toml"
        path.write_text(text)
        return str(path)

    return write


GOOD = '[small]\nrows = 3\nrate = 1\nkind = "a"\nfast = false\n'


def test_command_line_wins_over_preset_and_missing_optionals_are_none(preset):
    value = resolve(Small, "small", preset(GOOD), {"rows": 5, "kind": None})
    assert value == Small(rows=5, rate=1.0, kind="a", limit=None, fast=False)
    assert isinstance(value.rate, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("rows = 3\n", ""), "sets no 'rows'.*give --rows"),
        (GOOD + "rwos = 3\n", "unknown key 'rwos'.*did you mean 'rows'"),
        (GOOD.replace("rows = 3", "rows = 3.5"), "rows: found 3.5, expected int"),
        (GOOD.replace("rows = 3", "rows = true"), "rows: found True, expected int"),
        (GOOD.replace('"a"', '"c"'), "kind: found 'c', expected 'a' or 'b'"),
        ("[other]\n", r"no \[small\] table; found: other"),
        ("[small\n", "not valid TOML"),
    ],
)
def test_bad_presets_are_refused_by_key(preset, text, message):
    with pytest.raises(UsageError, match=message):
        resolve(Small, "small", preset(text), {})


def test_unknown_preset_lists_the_known():
    with pytest.raises(UsageError, match="expected one of .*paper.*tiny"):
        load_preset("huge", "dump")


def test_options_follow_the_fields(preset):
    seen = {}

    @click.command()
    @setting_options(Small, "small", default_preset="paper")
    def command(**given):
        seen.update(given)

    done = CliRunner().invoke(command, ["--rows", "4", "--no-fast", "--kind", "b"])
    assert done.exit_code == 0, done.output
    assert seen == {
        "preset": "paper",
        "rows": 4,
        "rate": None,
        "kind": "b",
        "limit": None,
        "fast": False,
    }
    assert CliRunner().invoke(command, ["--kind", "c"]).exit_code == 2


def test_every_shipped_dump_preset_resolves():
    from teacher_dump.config import DumpConfig

    for name in preset_names():
        given = {"tokenizer": "x"} if name == "tiny-teacher" else {}
        config = resolve(DumpConfig, "dump", name, given)
        assert dataclasses.is_dataclass(config)
    paper = resolve(DumpConfig, "dump", "paper", {})
    assert (paper.max_length, paper.k, paper.shards) == (8192, 64, 64)
    assert paper.max_validation_rows == 4833


def test_help_groups_presets_by_value():
    from shared.config import _preset_values

    tables = {"a": {"x": 1, "y": 2}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    assert _preset_values("x", tables) == "1"
    assert _preset_values("y", tables) == "a, c: 2"
    assert _preset_values("y", tables | {"d": {"y": 3}}) == "a, c: 2; d: 3"
    assert _preset_values("z", tables) == ""
