"""The training loop of one run, top to bottom: phases, steps, validation, checkpoints, exports."""

import math
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from shared.cache import CacheReader
from shared.collective import init_distributed
from shared.distributed import ranks
from shared.errors import DamagedError, UsageError
from shared.progress import progress, say
from shared.sidecar import local_sidecar
from shared.store import open_store
from student_train.config import RunConfig, model_config
from student_train.engine import Engine, engine_config
from student_train.evaluate import evaluate, write_losses
from student_train.export import write_export
from student_train.growth import Phase, build_student, inherit, phases, teacher_config
from student_train.runfolder import START, Position, RunFolder, phase_tag, step_tag
from student_train.stream import training_batches


def learning_rate(step: int, run: RunConfig) -> float:
    """Rate of step `step` (from 0) of a phase: linear warm-up, then a cosine down to `lr_min`."""
    if step < run.warmup_steps:
        return run.lr * (step + 1) / run.warmup_steps
    done = (step - run.warmup_steps) / max(1, run.steps_per_phase - run.warmup_steps)
    return run.lr_min + 0.5 * (run.lr - run.lr_min) * (1 + math.cos(math.pi * done))


def train(run: RunConfig, cache: str | Path, out: Path) -> None:
    """Train one arm from the cache (a folder or URL) into `out`, or go on where it stands.

    Everything that can be refused is refused before the ranks meet and before anything is written.
    """
    store = open_store(cache)
    readers = {split: CacheReader(store, split, run.k) for split in ("train", "validation")}
    fingerprint = readers["train"].fingerprint
    check_records(run, fingerprint, cache)
    world = ranks().world
    engine_config(run, world)
    sidecar = local_sidecar(store, fingerprint)
    model_config(run, fingerprint["vocab_size"], teacher_config(sidecar), run.blocks)
    config = run_config_json(run, cache, fingerprint)
    folder = RunFolder(out)
    folder.check(config)
    position = folder.position()
    plan = phases(run)
    if position.done and position.phase == plan[-1].index:
        say(f"{out} is complete: nothing to do")
        return
    if position.tag and not position.done and position.world != world:
        raise DamagedError(
            f"{out} stopped inside phase {position.phase} on {position.world} ranks, found "
            f"{world}: start it with {position.world} (at a phase boundary any number will do)"
        )
    init_distributed()
    dist.barrier()  # rank 0 must not write into what another rank still checks
    if dist.get_rank() == 0:
        folder.start(config)
    seen: list[Position | None] = [None] * world
    dist.all_gather_object(seen, folder.position())
    if any(other != position for other in seen):
        raise DamagedError(
            f"the ranks find different states of {out}: it must be one folder that all of them "
            "see, and no other process may be writing to it"
        )
    if position != START:
        say(f"resuming {out} at phase {position.phase}, step {position.step}")
    for phase in plan[position.phase + position.done :]:
        position = _train_phase(run, phase, folder, readers, sidecar, position)


def check_records(run: RunConfig, fingerprint: dict[str, Any], cache: str | Path) -> None:
    """Raise UsageError if the cache's records cannot give the loss that the run asks for."""
    kind = fingerprint["kind"]
    if run.alpha > 0 and kind == "tokens":
        raise UsageError(f"{cache} holds tokens without teacher records: give --alpha 0")
    if run.tau != 1 and kind == "sample":
        raise UsageError(f"tau: found {run.tau}, expected 1: {cache} holds draws at temperature 1")


def _train_phase(
    run: RunConfig,
    phase: Phase,
    folder: RunFolder,
    readers: dict[str, CacheReader],
    sidecar: Path,
    position: Position,
) -> Position:
    """One phase: build, inherit, train, validate, checkpoint, export; returns its close."""
    student = build_student(run, sidecar, readers["train"].vocab_size, phase.active_blocks)
    if phase.index > 0:
        inherit(student, folder.export(phase.index - 1))
    engine = Engine(student, run)
    rank, world = engine.rank, engine.world
    inside = position.phase == phase.index and position.tag is not None
    first = position.step if inside else 0
    tokens = position.tokens
    if inside:
        engine.load(folder.checkpoints, position.tag)
    else:
        _validate(engine, folder, readers["validation"], phase, 0)

    micro_rows = run.micro_rows or run.batch_rows // world
    steps = range(phase.first_step + first, phase.first_step + phase.steps)
    batches = training_batches(
        readers["train"], run.seed, steps, run.batch_rows, micro_rows, rank, world
    )
    label = f"{run.norm} {run.curriculum} phase {phase.index} ({phase.active_blocks} blocks)"
    with progress(label, phase.steps, done=first) as advance:
        started = time.perf_counter()
        for step, (micro, targets) in enumerate(batches, start=first):
            lr = learning_rate(step, run)
            losses = engine.step(micro, targets, lr)
            tokens += targets
            now = time.perf_counter()
            line = {
                "step": phase.first_step + step + 1,
                "phase": phase.index,
                "phase_step": step + 1,
                "tokens": tokens,
                **losses,
                "lr": lr,
                "tokens_per_s": round(targets / (now - started), 1),
            }
            started = now
            if not math.isfinite(losses["loss"] + (losses["grad_norm"] or 0)):
                raise click.ClickException(
                    f"the loss is {losses['loss']} and the gradient norm {losses['grad_norm']} at "
                    f"step {line['step']}; the last checkpoint is kept; start a new run with a "
                    "lower --lr or another seed"
                )
            if rank == 0:
                folder.append_metrics(line)
            advance(1, f"loss {losses['loss']:.3f} ce {losses['ce']:.3f} kd {losses['kd']:.3f}")
            last = step + 1 == phase.steps
            if not last and run.validate_every and (step + 1) % run.validate_every == 0:
                _validate(engine, folder, readers["validation"], phase, step + 1)
                started = time.perf_counter()
            if not last and run.checkpoint_every and (step + 1) % run.checkpoint_every == 0:
                tag = step_tag(phase.index, step + 1)
                engine.save(folder.checkpoints, tag)
                _commit(folder, rank, Position(phase.index, step + 1, False, tag, world, tokens))
                started = time.perf_counter()

    _validate(engine, folder, readers["validation"], phase, phase.steps)
    engine.save(folder.checkpoints, phase_tag(phase.index))
    weights = engine.full_weights()
    if rank == 0:
        write_export(folder.export(phase.index), engine.config, weights, sidecar)
    closing = Position(phase.index, phase.steps, True, phase_tag(phase.index), world, tokens)
    _commit(folder, rank, closing)
    engine.close()
    return closing


def _commit(folder: RunFolder, rank: int, position: Position) -> None:
    """Rank 0 commits once every rank has written; the others wait, so none runs ahead."""
    dist.barrier()
    if rank == 0:
        folder.commit(position)
    dist.barrier()


def _validate(
    engine: Engine, folder: RunFolder, reader: CacheReader, phase: Phase, step: int
) -> None:
    run = engine.run
    engine.student.eval()
    rows = run.micro_rows or run.batch_rows // engine.world
    losses = evaluate(engine.student, reader, rows, run.tau, engine.device)
    engine.student.train()
    if engine.rank == 0:
        write_losses(folder.validation(phase.index, step), losses, phase.index, step)
        say(
            f"{run.norm} {run.curriculum} phase {phase.index} step {step}: "
            f"validation ce {losses.ce:.4f} kd {losses.kd:.4f} nats/token"
        )


def run_config_json(
    run: RunConfig, cache: str | Path, fingerprint: dict[str, Any]
) -> dict[str, Any]:
    """What config.json holds: the settings, the phases, the cache and the versions."""
    return {
        **asdict(run),
        "phases": [asdict(phase) for phase in phases(run)],
        "cache": {"path": str(cache), "fingerprint": fingerprint},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
