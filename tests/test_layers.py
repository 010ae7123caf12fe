"""The rules of the layout: which way imports point, where deepspeed is, how long a file may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "teacher_dump", "student_train", "launch")
ALLOWED = {
    "shared": {"shared"},
    "teacher_dump": {"shared", "teacher_dump"},
    "student_train": {"shared", "student_train"},
    "launch": {"teacher_dump", "student_train"},
}
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_keeps_to_its_room(path):
    package = path.relative_to(ROOT).parts[0]
    ours = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
    assert ours <= ALLOWED[package]
    if path.name not in ("cli.py", "__main__.py", "student.py"):
        assert not [name for name in imports(path) if name.endswith(".cli")]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400
    assert lines[0].startswith('"""')


def test_deepspeed_is_imported_in_one_file_of_each_package():
    users = {p.name for p in FILES for name in imports(p) if name.split(".")[0] == "deepspeed"}
    assert users == {"collective.py", "engine.py", "parallel.py"}
