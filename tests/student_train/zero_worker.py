"""Run under torchrun by test_engine.py: one short grown run per ZeRO stage and type."""

import sys
from pathlib import Path

from shared.config import resolve
from student_train.config import RunConfig
from student_train.loop import train

if __name__ == "__main__":
    cache, out = map(Path, sys.argv[1:3])
    for arm in sys.argv[3:]:
        stage, dtype, micro, *still = arm.split("-")
        given = {
            "norm": "pre",
            "blocks": 2,
            "layers_per_block": 1,
            "steps_per_phase": 3,
            "batch_rows": 8,
            "warmup_steps": 2,
            "validate_every": 0,
            "checkpoint_every": 0,
            "deepspeed_config": stage,
            "dtype": dtype,
            "micro_rows": int(micro),
        }
        if still:
            given |= {"lr": 1e-30, "lr_min": 1e-30}
        train(resolve(RunConfig, "student", "tiny", given), cache, out / arm)
