"""Train one student arm: `deepspeed launch/student.py --norm post`.

Runs under the deepspeed launcher, torchrun, srun, or alone (`python launch/student.py`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from student_train.cli import run_command  # noqa: E402

if __name__ == "__main__":
    run_command()
