"""Starting student runs as a user would: real launchers, real ranks, small settings."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = [
    "--preset", "tiny", "--blocks", "2", "--layers-per-block", "1", "--steps-per-phase", "8",
    "--batch-rows", "8", "--warmup-steps", "2", "--validate-every", "0",
]  # fmt: skip


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(how: str, args: list, kill_when=None) -> subprocess.CompletedProcess:
    """Run launch/student.py under `how`; kill -9 every process once `kill_when` is true."""
    scripts = Path(sys.executable).parent
    command = {
        "python": [sys.executable],
        "deepspeed": [scripts / "deepspeed", "--num_gpus", "2", "--master_port", free_port()],
        "torchrun": [scripts / "torchrun", "--standalone", "--nproc_per_node", "2"],
    }[how]
    command = [*command, ROOT / "launch" / "student.py", *SMALL, *args]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "SLURM"))}
    process = subprocess.Popen(
        [str(part) for part in command],
        env=env | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    while kill_when and process.poll() is None:
        if kill_when():
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    output, _ = process.communicate(timeout=240)
    return subprocess.CompletedProcess(command, process.returncode, output)
