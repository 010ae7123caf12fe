"""The DeepSpeed engine: one step, ZeRO checkpoints, and full weights by name.

The only file of the student stage that imports deepspeed. On a CPU the same code runs over gloo.
DeepSpeed's checkpoints are pickles: load only those that this run wrote (they sit in its folder).
"""

import contextlib
import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import DamagedError, UsageError
from student_train.config import RunConfig
from student_train.loss import LossWeights
from student_train.model import Student
from student_train.stream import Batch

DEEPSPEED_CONFIGS = Path(__file__).parent.parent / "launch" / "deepspeed"


def engine_config(run: RunConfig, world: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the chosen JSON, with batch, clip and dtype of the run."""
    name = run.deepspeed_config
    path = Path(name) if name.endswith(".json") else DEEPSPEED_CONFIGS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in DEEPSPEED_CONFIGS.glob("*.json")))
        raise UsageError(f"no DeepSpeed configuration {name!r}: expected {known} or a .json file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"{path}: zero_optimization stage is {stage!r}, expected 0, 1, 2 or 3")
    if config.get("fp16", {}).get("enabled"):
        raise UsageError(f"{path} enables fp16, which is not supported: use --dtype bfloat16")
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise UsageError(f"{path} sets {key!r}: remove it, the run's own options decide it")
    if run.dtype == "bfloat16" and stage == 0:
        raise UsageError(
            f"{name} has ZeRO stage 0, which does not hand out its float32 masters, and a phase "
            "must pass them on: with --dtype bfloat16 use zero1, zero2 or zero3"
        )
    if run.batch_rows % world:
        raise UsageError(f"batch_rows {run.batch_rows} does not divide over {world} ranks")
    per_rank = run.batch_rows // world
    micro = run.micro_rows or per_rank
    if per_rank % micro:
        raise UsageError(f"micro_rows {micro} does not divide the {per_rank} rows of a rank")
    return config | {
        "train_batch_size": run.batch_rows,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": per_rank // micro,
        "gradient_clipping": run.clip,
        "bf16": {"enabled": run.dtype == "bfloat16"},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }


class Engine:
    """A DeepSpeed engine over one phase's student. Weights must be in place before this."""

    def __init__(self, student: Student, run: RunConfig) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        self.run = run
        self.config = student.config
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()
        trained = [p for p in student.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=run.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        masters = {}
        if run.dtype == "bfloat16":  # the engine would round what an earlier phase learnt
            masters = {name: p.detach().clone() for name, p in student.named_parameters()}
        self._engine, *_ = deepspeed.initialize(
            model=student, optimizer=optimizer, config=engine_config(run, self.world)
        )
        self.student: Student = self._engine.module
        for name, parameter in self.student.named_parameters():
            if masters and parameter.requires_grad:
                safe_set_full_fp32_param(parameter, masters[name].to(self._engine.device))
        self.device = self._engine.device

    def step(self, micro: list[Batch], targets: int, lr: float) -> dict[str, float]:
        """One optimiser step; returns loss, kd, ce (nats per target, all ranks) and grad_norm.

        micro: this rank's batches. targets: positions with a target in the step, all ranks.
        The loss is the mean over those: DeepSpeed averages over ranks and micro-batches, so each
        share is scaled back up.
        """
        run = self.run
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        weights = LossWeights(run.alpha, run.gamma, run.tau)
        targets = max(1, targets)  # every row a single token: nothing to learn, no NaN
        scale = self.world * len(micro) / targets
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in micro:
            batch = batch.to(self.device)
            loss, kd, ce = self._engine(
                batch.tokens, batch.layout, batch.positions, batch.targets, weights, scale
            )
            self._engine.backward(loss)
            self._engine.step()
            sums += torch.stack([kd.double().sum(), ce.double().sum()])
        dist.all_reduce(sums)
        kd, ce = (sums / targets).tolist()
        norm = self._engine.get_global_grad_norm()
        return {
            "loss": run.alpha * kd + run.gamma * ce,
            "kd": kd,
            "ce": ce,
            "grad_norm": None if norm is None else float(norm),
        }

    def save(self, folder: Path, tag: str) -> None:
        """Write the ZeRO checkpoint set `folder/tag`, on every rank; commit it yourself."""
        with _quiet():
            self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        dist.barrier()

    def load(self, folder: Path, tag: str) -> None:
        """Load the ZeRO checkpoint set `folder/tag`. Raises DamagedError if it is not whole."""
        try:
            with _quiet():
                path, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        except Exception as error:  # torch and DeepSpeed raise anything here
            raise DamagedError(
                f"checkpoint {folder / tag} does not load ({type(error).__name__}: {error}): "
                "restore it, or start a new run with another --out"
            ) from error
        if path is None:
            raise DamagedError(f"checkpoint {folder / tag} is missing: restore it, or start anew")

    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter by name, whole and in float32 on the CPU; a collective call.

        Masters where ZeRO keeps them apart from the weights, so that a bfloat16 phase hands on
        what its optimiser had. Ranks other than 0 get an empty dict.
        """
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        out = {}
        for name, parameter in self.student.named_parameters():
            partitioned = hasattr(parameter, "ds_id")
            if parameter.requires_grad and (partitioned or hasattr(parameter, "_hp_mapping")):
                full = safe_get_full_fp32_param(parameter)
            else:
                with deepspeed.zero.GatheredParameters(parameter, enabled=partitioned):
                    full = parameter.detach().clone()
            if self.rank == 0:
                out[name] = full.detach().to("cpu", torch.float32).contiguous()
        return out

    def close(self) -> None:
        """Free the engine before the next phase builds its own."""
        self._engine.destroy()
        self._engine = self.student = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _quiet() -> Any:
    """DeepSpeed reports every file at INFO; errors still show."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
