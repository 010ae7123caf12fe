"""A finished student run, shared by the tests."""

from pathlib import Path

import pytest
from launching import launch


@pytest.fixture(scope="session")
def grown(cache_dir, tmp_path_factory) -> Path:
    """A finished post-norm run that grew from one block to two, on two ranks."""
    out = tmp_path_factory.mktemp("runs") / "grown"
    done = launch("deepspeed", ["--norm", "post", "--cache", cache_dir, "--out", out])
    assert done.returncode == 0, done.stdout
    return out
