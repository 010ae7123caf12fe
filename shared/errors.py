"""Errors that end a command: one message (found, expected, what to do) and an exit code.

    click.ClickException
    |-- UsageError      exit 2   bad option, configuration or input data
    `-- DamagedError    exit 3   a cache, run or checkpoint that is damaged, incomplete or foreign
        `-- UnreadableError      ... whose bytes are broken

Exit code 0 is success and 1 an unexpected failure (a traceback). They subclass click's exception,
so a command line prints the message alone and library callers can still catch them.
"""

from typing import IO, Any

import click

from shared.distributed import ranks


class UsageError(click.ClickException):
    """A bad option, configuration or input; nothing was written.

    Every rank finds it, so the first of each machine says it for all.
    """

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        if ranks().local_rank == 0:
            super().show(file)


class DamagedError(click.ClickException):
    """A cache, run or checkpoint on disk is damaged, incomplete, or belongs to something else.

    One rank alone may meet it, so each says it, and which rank it is.
    """

    exit_code = 3

    def format_message(self) -> str:
        here = ranks()
        return f"rank {here.rank}: {self.message}" if here.world > 1 else self.message


class UnreadableError(DamagedError):
    """The bytes themselves are broken, so there is no telling what they were; to be made again."""


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
