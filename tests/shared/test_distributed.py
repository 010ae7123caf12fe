"""Ranks and workers from the environment, and who speaks."""

import pytest

from shared.distributed import Ranks, ranks, worker
from shared.errors import UsageError
from shared.progress import progress, say

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_COUNT",
)


@pytest.fixture
def env(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


def test_alone(env):
    assert ranks() == Ranks(0, 1, 0)
    assert worker() == (0, 1)


def test_launcher_wins_over_slurm_and_is_not_mixed_with_it(env):
    env(SLURM_PROCID=7, SLURM_STEP_NUM_TASKS=8, SLURM_LOCALID=3)
    assert ranks() == Ranks(7, 8, 3)
    env(RANK=1, WORLD_SIZE=2)
    assert ranks() == Ranks(1, 2, 0)
    env(LOCAL_RANK=1)
    assert ranks() == Ranks(1, 2, 1)


def test_workers_of_an_array_are_numbered_through(env):
    seen = set()
    for task in (10, 11, 12):
        for rank in (0, 1):
            env(
                RANK=rank,
                WORLD_SIZE=2,
                SLURM_ARRAY_TASK_MIN=10,
                SLURM_ARRAY_TASK_MAX=12,
                SLURM_ARRAY_TASK_ID=task,
                SLURM_ARRAY_TASK_COUNT=3,
            )
            index, count = worker()
            assert count == 6
            seen.add(index)
    assert seen == set(range(6))


def test_an_array_with_gaps_is_refused(env):
    env(
        SLURM_ARRAY_TASK_MIN=10,
        SLURM_ARRAY_TASK_MAX=14,
        SLURM_ARRAY_TASK_ID=12,
        SLURM_ARRAY_TASK_COUNT=3,
    )
    with pytest.raises(UsageError, match="3 tasks numbered 10 to 14, expected no gaps"):
        worker()


def test_only_rank_0_speaks(env, capsys):
    env(RANK=1, WORLD_SIZE=2)
    say("hidden")
    with progress("rows", 2) as advance:
        advance(2, "")
    assert capsys.readouterr().err == ""
    env(RANK=0)
    say("shown")
    with progress("rows", 5, done=3) as advance:
        advance(2, "fast")
    assert capsys.readouterr().err == "shown\nrows 5/5 fast\n"
