"""Errors that end a command: one message (found, expected, what to do) and an exit code.

    click.ClickException
    |-- UsageError      exit 2   bad option, configuration or input data
    `-- DamagedError    exit 3   a cache, run or checkpoint that is damaged, incomplete or foreign

Exit code 0 is success and 1 an unexpected failure (a traceback). They subclass click's exception,
so a command line prints the message alone and library callers can still catch them.
"""

import os
from typing import IO, Any

import click


class _RankedError(click.ClickException):
    """Shows its message once: every rank finds the same fault, only rank 0 needs to say it."""

    def show(self, file: IO[Any] | None = None) -> None:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            super().show(file)


class UsageError(_RankedError):
    """A bad option, configuration or input; nothing was written."""

    exit_code = 2


class DamagedError(_RankedError):
    """A cache, run or checkpoint on disk is damaged, incomplete, or belongs to something else."""

    exit_code = 3


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """One line per key that differs, nested keys dotted: `key: found X, expected Y`."""

    def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, inner in value.items():
            name = f"{prefix}{key}"
            items.update(flat(inner, f"{name}.") if isinstance(inner, dict) else {name: inner})
        return items

    a, b = flat(found), flat(expected)
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    return "\n".join(f"  {key}: found {a.get(key)!r}, expected {b.get(key)!r}" for key in keys)
