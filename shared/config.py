"""Settings: a frozen dataclass per command, filled from a preset (TOML) and the command line.

A field made with `setting(...)` is one option of the command line and one key of the preset's
table. Precedence: preset < command line. A key a preset lacks is None, allowed only where the
field's type says so. There is one list of settings, so `--help`, presets and code cannot drift.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shared.errors import UsageError

PRESETS = Path(__file__).parent.parent / "launch" / "presets"
Settings = TypeVar("Settings")


def setting(text: str) -> Any:
    """A dataclass field that is also a command-line option with help `text`."""
    return dataclasses.field(metadata={"help": text})


def load_preset(name: str, table: str) -> dict[str, Any]:
    """The `[table]` of preset `name` (a file in launch/presets) or of a TOML file path."""
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(preset_names())
        raise UsageError(f"no preset {name!r}: expected one of {known}, or a path to a .toml file")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    if table not in tables:
        raise UsageError(f"preset {path} has no [{table}] table; found: {', '.join(tables)}")
    return tables[table]


def preset_names() -> list[str]:
    """Names of the presets that ship with the product."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def resolve(cls: type[Settings], table: str, preset: str, given: dict[str, Any]) -> Settings:
    """Build `cls` from the preset's table and the options `given` (None: not given).

    Raises UsageError for an unknown key, a missing value or a value of the wrong type.
    """
    values = load_preset(preset, table)
    known = {field.name: _type_of(cls, field.name) for field in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"preset {preset}: unknown key {key!r} in [{table}]{hint}")
    values = values | {key: value for key, value in given.items() if value is not None}
    for key, (base, choices, optional) in known.items():
        value = values.setdefault(key, None)
        if value is None and not optional:
            flag = "--" + key.replace("_", "-")
            raise UsageError(f"preset {preset} sets no {key!r} in [{table}]: give {flag}")
        if value is None:
            continue
        if base is float and isinstance(value, int) and not isinstance(value, bool):
            values[key] = value = float(value)
        if type(value) is not base or (choices and value not in choices):
            expected = " or ".join(map(repr, choices)) if choices else base.__name__
            raise UsageError(f"{key}: found {value!r}, expected {expected}")
    return cls(**values)


def setting_options(cls: type, table: str, default_preset: str) -> Callable[[Any], Any]:
    """Decorate a click command with `--preset` and one option per field of `cls`."""
    tables = {name: load_preset(name, table) for name in preset_names() if _has(name, table)}

    def decorate(command: Any) -> Any:
        for field in reversed(dataclasses.fields(cls)):
            base, choices, _ = _type_of(cls, field.name)
            flag = "--" + field.name.replace("_", "-")
            shown = _preset_values(field.name, tables)
            text = field.metadata["help"] + (f"  [{shown}]" if shown else "")
            command = click.option(
                f"{flag}/--no-{flag[2:]}" if base is bool else flag,
                type=click.Choice(choices) if choices else base,
                default=None,
                help=text,
            )(command)
        return click.option(
            "--preset",
            default=default_preset,
            show_default=True,
            help=f"Named settings ({', '.join(tables)}) or a .toml file; options override it.",
        )(command)

    return decorate


def _preset_values(key: str, tables: dict[str, dict[str, Any]]) -> str:
    """What the presets set `key` to, presets of one value together: `paper: 64; tiny: 8`."""
    by_value: dict[str, list[str]] = {}
    for name, values in tables.items():
        if key in values:
            by_value.setdefault(str(values[key]), []).append(name)
    if len(by_value) == 1 and [*tables] in by_value.values():
        return next(iter(by_value))
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in by_value.items())


def _has(name: str, table: str) -> bool:
    return table in tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))


def _type_of(cls: type, name: str) -> tuple[type, tuple[str, ...], bool]:
    """(base type, allowed values, may be None) of a field, from its annotation."""
    annotation = typing.get_type_hints(cls)[name]
    optional = False
    if isinstance(annotation, types.UnionType):
        inner = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        annotation, optional = inner[0], True
    if typing.get_origin(annotation) is typing.Literal:
        return str, typing.get_args(annotation), optional
    return annotation, (), optional
