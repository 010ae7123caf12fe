"""Text corpus cut from the running interpreter's standard library, one document per definition."""

import ast
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
MIN_CHARACTERS = 80

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def stdlib_documents() -> list[str]:
    """Distinct documents of the standard library's modules (tests left out), in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: dict[str, None] = {}  # a dict keeps the first of identical texts, in order
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.split("\n")  # as ast counts them; splitlines also cuts at form feeds
        for first, last in _spans(tree.body, 0, len(lines)):
            text = textwrap.dedent("\n".join(lines[first:last])).strip()
            documents.setdefault(text)
    return [text for text in documents if len(text) >= MIN_CHARACTERS]


def _spans(body: list[ast.stmt], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Line ranges of a module's or class's header and of each definition in its body."""
    definitions = [node for node in body if isinstance(node, Definition)]
    starts = [min(n.lineno for n in (node, *node.decorator_list)) - 1 for node in definitions]
    yield first, min(starts, default=last)
    for node, start in zip(definitions, starts, strict=True):
        end = node.end_lineno or start + 1
        if isinstance(node, ast.ClassDef):
            yield from _spans(node.body, start, end)
        else:
            yield start, end
