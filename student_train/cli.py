"""The command `student-train`: train one arm, report on several, export one."""

from pathlib import Path
from typing import Any

import click

from shared.config import resolve, setting_options
from student_train.config import RunConfig

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=HELP)
def main() -> None:
    """Train students from a teacher cache and answer what their norm placement and growth did."""


@main.command("run", context_settings=HELP)
@setting_options(RunConfig, "student", default_preset="paper")
@click.option(
    "--cache",
    default="cache",
    show_default=True,
    help="Cache that teacher-dump wrote: a folder or a URL.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Run folder; default runs/NORM-CURRICULUM-seed-N.",
)
@click.option("--local_rank", "--local-rank", hidden=True, type=int, default=None)
def run_command(
    preset: str, cache: str, out: Path | None, local_rank: int | None, **given: Any
) -> None:
    """Train one arm. The same command again goes on where the last checkpoint stands.

    Example: deepspeed --num_gpus 8 launch/student.py --norm post --curriculum grow
    """
    run = resolve(RunConfig, "student", preset, given)
    out = out or Path("runs") / f"{run.norm}-{run.curriculum}-seed-{run.seed}"
    from student_train.loop import train

    train(run, cache, out)


@main.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report"),
    show_default=True,
    help="Folder for report.html and results.json.",
)
def report_command(runs: tuple[Path, ...], out: Path) -> None:
    """Print the placement x curriculum table of RUNS with intervals, and write report.html.

    Example: student-train report runs/* --out report
    """
    from student_train.report import build_report, table_text

    click.echo(table_text(build_report(runs, out)))
    click.echo(f"wrote {out / 'report.html'} and {out / 'results.json'}")


@main.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder to write.")
@click.option("--phase", type=int, default=None, help="Phase to export; default the last.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the weights.",
)
def export_command(run: Path, out: Path, phase: int | None, dtype: str) -> None:
    """Write a phase of RUN as a model folder; a pre-norm one is a transformers Qwen3 model."""
    from student_train.export import export_run

    source = export_run(run, phase, out, dtype)
    click.echo(f"wrote {out} from {source}")


@main.command("baseline")
@click.argument("cache")
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    default=None,
    help="A model folder of student-train to compare.",
)
def baseline_command(cache: str, export: Path | None) -> None:
    """Held-out nats per token of a bigram model of CACHE's train tokens, and of an export.

    Example: student-train baseline build/tokens --export launch/tiny_teacher
    """
    from shared.cache import CacheReader
    from student_train.bigram import bigram_nats

    train, held_out = CacheReader(cache, "train"), CacheReader(cache, "validation")
    tokens = [[split.row(n).tokens for n in range(len(split))] for split in (train, held_out)]
    bigram = bigram_nats(*tokens, train.vocab_size)
    click.echo(f"bigram (modified Kneser-Ney)  {bigram:.4f} nats/token, held out")
    if export is not None:
        from shared.collective import init_distributed
        from student_train.evaluate import evaluate
        from student_train.export import load_student

        student, device = load_student(export), init_distributed()
        losses = evaluate(student.to(device), held_out, 16, 1.0, device)
        click.echo(f"{export}  {losses.ce:.4f} nats/token, {losses.ce - bigram:+.4f} to the bigram")
