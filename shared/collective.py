"""Joining ranks that talk to each other, through DeepSpeed: nccl on GPUs, gloo on CPUs."""

import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from shared.distributed import ranks
from shared.errors import UsageError


def init_distributed(patience: timedelta = timedelta(minutes=30)) -> torch.device:
    """Join the ranks that the launcher made, over nccl or gloo; returns this rank's device.

    `patience`: how long a rank waits for another before it gives up.
    Raises UsageError for several nodes without an address to meet at.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed's own calls: nothing a user could change.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Else DeepSpeed compiles a shared-memory operator for minutes, which training never calls;
        # killed meanwhile, its lock file hangs every later start.
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    here = ranks()
    if int(os.environ.get("SLURM_NNODES", 1)) > 1 and "MASTER_ADDR" not in os.environ:
        raise UsageError(
            f"{os.environ['SLURM_NNODES']} nodes and no MASTER_ADDR: in the job script, export "
            "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1) and MASTER_PORT"
        )
    port = 29500 if here.world > 1 else 0  # one process alone needs no agreed port
    found = {
        "RANK": here.rank,
        "WORLD_SIZE": here.world,
        "LOCAL_RANK": here.local_rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in found.items():
        os.environ.setdefault(name, str(value))
    if accelerator.device_name() != "cpu":
        # Where the scheduler shows each rank its own GPU alone, that one is number 0.
        accelerator.set_device(here.local_rank % accelerator.device_count())
    if not dist.is_initialized():
        backend = accelerator.communication_backend_name()
        deepspeed.init_distributed(backend, verbose=False, timeout=patience)
    return torch.device(accelerator.current_device_name())
