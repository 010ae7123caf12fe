"""A teacher over several ranks, with DeepSpeed: who works on what, and how the teacher is split.

- `data`: every rank holds the teacher and makes shards of its own. No communication.
- `zero3`: ZeRO-3 partitions the weights over the ranks, from loading on. Every rank makes shards of
  its own, but a forward pass is a step of all of them: who has nothing left to do steps along.
- `tensor`: AutoTP splits the layers over `tp_size` ranks, which work on the same rows; the first of
  them writes.

The head's float32 copy is whole on every rank: the product with it is the rank's own.
The only file of the teacher stage that imports deepspeed.
"""

import contextlib
import gc
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared.collective import init_distributed
from shared.distributed import ranks, worker
from shared.errors import UsageError
from shared.progress import say
from teacher_dump.config import DumpConfig
from teacher_dump.teacher import (
    Teacher,
    check_head,
    cut_teacher,
    final_norm,
    load_model,
    load_teacher,
)

# One rank may check finished shards, or make a last one, for hours while the others wait; a rank
# that dies is noticed by its launcher.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Team:
    """This rank's part in a dump: worker `index` of `count`, and what it shares with others."""

    parallel: str
    index: int
    count: int
    group: list[int]  # ranks that work on the same rows
    device: torch.device | None = None  # set by `join`

    @property
    def writes(self) -> bool:
        """Whether this rank writes its worker's shards."""
        return ranks().rank == self.group[0]

    @property
    def leads(self) -> bool:
        """Whether this rank also writes what is there once for all shards."""
        return self.parallel == "data" or ranks().rank == 0

    def join(self) -> "Team":
        """Meet the other ranks, if they are needed."""
        return self if self.parallel == "data" else replace(self, device=init_distributed(PATIENCE))

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any of the ranks that step together; waits for them."""
        if self.parallel == "data":
            return flag
        found = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def agreed(self, value: Any) -> Any:
        """The value that the writing rank of this rank's group has."""
        if self.parallel == "data":
            return value
        values: list[Any] = [None] * ranks().world
        dist.all_gather_object(values, value)
        return values[self.group[0]]


def team(config: DumpConfig) -> Team:
    """This rank's team, from the environment. Raises UsageError if the ranks do not divide."""
    here = ranks()
    size = 1
    if config.parallel == "tensor":
        size = config.tp_size or here.world
        if here.world % size:
            raise UsageError(f"tp_size {size} does not divide the {here.world} ranks that run")
    first = here.rank // size * size
    return Team(config.parallel, *worker(size), list(range(first, first + size)))


def load(team: Team, folder: Path, dtype: str, token_ids: int) -> Teacher:
    """Load the teacher in `folder` as the team splits it; see `teacher.load_teacher`."""
    if team.parallel == "data":
        return load_teacher(folder, dtype, token_ids)
    split = _partitioned if team.parallel == "zero3" else _tensor_parallel
    teacher = split(team, folder, dtype, token_ids)
    here = sum(getattr(p, "ds_tensor", p).numel() for p in teacher.model.parameters())
    say(f"{team.parallel}: rank 0 of {ranks().world} holds {here} weights of the teacher")
    return teacher if team.leads else replace(teacher, ends={})


def finish(teacher: Teacher | None) -> None:
    """Step along until all ranks are done; returns on all of them at once."""
    if teacher is not None and isinstance(teacher.decoder, Lockstep):
        teacher.decoder.finish()


class Lockstep:
    """The decoder of a ZeRO-3 teacher. Every call is one forward pass of all ranks."""

    def __init__(self, model: nn.Module, engine: Any, device: torch.device) -> None:
        self._model, self._engine, self._device = model, engine, device
        self._output: Any = None
        model.base_model.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, given: Any, output: Any) -> None:
        self._output = output

    def __call__(self, **inputs: Any) -> Any:
        self._working(1)
        return self._forward(**inputs)

    def _forward(self, **inputs: Any) -> Any:
        # Through the whole model: DeepSpeed counts its passes there. The head sees one position.
        self._model(**inputs, logits_to_keep=1)
        output, self._output = self._output, None
        return output

    def _working(self, here: int) -> int:
        total = torch.tensor(here, device=self._device)
        dist.all_reduce(total)
        return int(total)

    @torch.inference_mode()
    def finish(self) -> None:
        """Dummy passes for as long as another rank works."""
        while self._working(0):
            self._forward(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self._device))


def _partitioned(team: Team, folder: Path, dtype: str, token_ids: int) -> Teacher:
    import deepspeed

    with _partitioning(folder, dtype) as config:
        model = load_model(folder, dtype)
        engine, *_ = deepspeed.initialize(model=model, config=config)
    model.eval()
    whole = [
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        final_norm(model.base_model),
    ]
    needed = {id(p): p for module in whole for p in module.parameters()}  # tied ones once
    with deepspeed.zero.GatheredParameters(list(needed.values())):
        cut = cut_teacher(model, token_ids, team.device)
        teacher = replace(
            cut,
            decoder=Lockstep(model, engine, team.device),
            head=cut.head.clone(),
            bias=None if cut.bias is None else cut.bias.clone(),
            ends={name: tensor.cpu().clone() for name, tensor in cut.ends.items()},
        )
    check_head(teacher)
    return teacher


@contextlib.contextmanager
def _partitioning(folder: Path, dtype: str) -> Iterator[dict[str, Any]]:
    """DeepSpeed's configuration, under which transformers loads a model partitioned."""
    from transformers import AutoConfig
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    width = AutoConfig.from_pretrained(folder).get_text_config().hidden_size
    config = {
        "train_micro_batch_size_per_gpu": 1,  # asked for, not used
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,  # norms stay whole
        },
    }
    switch = HfDeepSpeedConfig(config)
    try:
        yield config
    finally:
        del switch
        unset_hf_deepspeed_config()
        gc.collect()


def _tensor_parallel(team: Team, folder: Path, dtype: str, token_ids: int) -> Teacher:
    import deepspeed
    from deepspeed.inference.engine import InferenceEngine

    model = load_model(folder, dtype)
    teacher = cut_teacher(model, token_ids, torch.device("cpu"))
    check_head(teacher)
    size = len(team.group)
    if size > 1:
        # DeepSpeed by itself would make one group, of the first ranks.
        groups = [dist.new_group(range(i, i + size)) for i in range(0, ranks().world, size)]
        InferenceEngine.inference_mp_group = groups[team.group[0] // size]
    with contextlib.redirect_stdout(io.StringIO()):
        engine = deepspeed.init_inference(
            model,
            dtype=getattr(torch, dtype),
            tensor_parallel={"tp_size": size},
            replace_with_kernel_inject=False,
        )
    return replace(
        teacher,
        model=engine.module,
        decoder=engine.module.base_model,
        head=teacher.head.to(team.device),
        bias=None if teacher.bias is None else teacher.bias.to(team.device),
        device=team.device,
    )
