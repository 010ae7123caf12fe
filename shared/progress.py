"""Progress of a long loop: a bar on a terminal, a line every ten seconds elsewhere, rank 0 only."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.distributed import ranks

LINE_SECONDS = 10.0


def say(message: str) -> None:
    """Print one line to stderr, from rank 0 only."""
    if ranks().rank == 0:
        print(message, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Yield `advance(n, detail)` to call after each piece of work; `done` starts a resumed bar."""
    if ranks().rank != 0:
        yield lambda n, detail="": None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task(label, total=total, completed=done, detail="")
            yield lambda n, detail="": bars.update(task, advance=n, detail=detail)
    else:
        state = {"done": done, "last": time.monotonic()}

        def advance(n: int, detail: str = "") -> None:
            state["done"] += n
            now = time.monotonic()
            if now - state["last"] >= LINE_SECONDS or state["done"] == total:
                state["last"] = now
                say(f"{label} {state['done']}/{total} {detail}".rstrip())

        yield advance
