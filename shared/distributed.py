"""Which rank this process is: read from the environment, no communication.

Order: the variables of DeepSpeed's launcher and torchrun, then SLURM's, then one process alone.
All three numbers come from one source, so a stray variable cannot mix two launchers.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process's place: `rank` of `world`, and `local_rank` on its machine."""

    rank: int
    world: int
    local_rank: int


def launched() -> Ranks | None:
    """The ranks that a launcher made; None if there was no launcher."""
    env = os.environ
    for rank, world, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ):
        if rank in env and world in env:
            return Ranks(int(env[rank]), int(env[world]), int(env.get(local, 0)))
    return None


def ranks() -> Ranks:
    """The ranks that the launcher made, or a single process."""
    return launched() or Ranks(0, 1, 0)


def worker(size: int = 1) -> tuple[int, int]:
    """(index, count) of this worker among all ranks of all tasks of a SLURM array.

    A worker is `size` consecutive ranks.

    Raises UsageError for an array with gaps: its tasks could not tell which share is whose.
    """
    here = ranks()
    first, last, task = (
        int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", 0)) for name in ("MIN", "MAX", "ID")
    )
    tasks = int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1))
    if last - first + 1 != tasks:
        from shared.errors import UsageError  # which asks us for the rank

        raise UsageError(
            f"found a SLURM array of {tasks} tasks numbered {first} to {last}, expected no gaps: "
            "submit the whole array again, finished shards are skipped"
        )
    workers = here.world // size
    return (task - first) * workers + here.rank // size, tasks * workers
