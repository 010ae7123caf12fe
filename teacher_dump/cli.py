"""Command line of the teacher stage: make a cache, check, show and convert one; a tokenizer.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from shared.config import resolve, setting_options
from shared.distributed import launched
from teacher_dump.config import DumpConfig


class _FilesAfterData(click.Group):
    """Lets `--data a.txt b.txt --out X` mean `--data a.txt --data b.txt --out X`.

    A shell expands `--data *.jsonl` to the first form, and click takes one value per option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat `--data` before each of its values, then parse as click does."""
        ctx.meta["arguments"] = list(args)
        spread: list[str] = []
        in_data = False
        for arg in args:
            if arg.startswith("-") or arg in self.commands:
                in_data = arg == "--data"
            elif in_data and spread[-1] != "--data":
                spread.append("--data")
            spread.append(arg)
        return super().parse_args(ctx, spread)


def _repeatable_data(command: Any) -> Any:
    """Let the option `--data` be given several times; its values are joined, one a line."""
    option = next(p for p in command.__click_params__ if p.name == "data")
    option.multiple = True
    option.callback = lambda ctx, param, values: "\n".join(values) or None
    return command


@click.group(
    cls=_FilesAfterData,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@_repeatable_data
@setting_options(DumpConfig, "dump", default_preset="paper")
@click.option(
    "--out", default="cache", show_default=True, help="Folder or URL (s3://...) of the cache."
)
@click.option(
    "--num-gpus",
    type=click.IntRange(min=0),
    help="Without a launcher, start this many ranks here through DeepSpeed's; 0: none, this "
    "process alone.  [default: one for each GPU in sight]",
)
@click.option("--local_rank", type=int, hidden=True, help="Given by deepspeed; not needed.")
@click.pass_context
def main(
    ctx: click.Context,
    preset: str,
    out: str,
    num_gpus: int | None,
    local_rank: int | None,
    **given: Any,
) -> None:
    """Run a teacher over text once and cache its top-k records as Parquet shards.

    Start it as it is (one rank for each GPU), with torchrun, deepspeed or srun, or as a SLURM
    array: the workers share the shards out. The same command again makes only what is missing.
    """
    if ctx.invoked_subcommand is not None:
        return
    config = resolve(DumpConfig, "dump", preset, given)
    if launched() is None:
        ranks_here = _gpus_in_sight() if num_gpus is None else num_gpus
        if ranks_here > 1:
            _start_ranks(num_gpus, ctx.meta["arguments"])
    # Read when torch is loaded. Waiting threads that spin make a small model on a machine with
    # other work ten times slower; sleeping ones cost nothing measurable.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from teacher_dump.dump import dump

    dump(config, out)


def _gpus_in_sight() -> int:
    import torch

    return torch.cuda.device_count()


def _start_ranks(count: int | None, arguments: list[str]) -> NoReturn:
    """Become DeepSpeed's launcher of this command, on all GPUs in sight or on `count`.

    A count is passed on only if it was given: else the launcher keeps to CUDA_VISIBLE_DEVICES.
    """
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    number = [] if count is None else ["--num_gpus", str(count)]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
    quiet = ["--log_level", "warning"]
    command = [*launcher, *number, *quiet, "--module", "teacher_dump", *arguments]
    os.execv(sys.executable, command)


@main.command()
@click.argument("cache")
@click.option("--deep", is_flag=True, help="Also compute some rows with the teacher again.")
@click.option("--teacher", help="Where the teacher is now; default as in the dump.")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Rows of each split that --deep computes.",
)
def verify(cache: str, deep: bool, teacher: str | None, rows: int) -> None:
    """Read every byte of CACHE and check it. Exit 3 and a table name what is wrong."""
    from shared.store import open_store
    from teacher_dump.verify import verify_cache, verify_deep

    verify_cache(open_store(cache))
    if deep:
        click.echo(verify_deep(open_store(cache), teacher, rows))


@main.command()
@click.argument("cache")
def manifest(cache: str) -> None:
    """Write CACHE/manifest.json again, from the shards' footers."""
    from shared.cache import read_footers, summary, write_manifest
    from shared.store import open_store

    store = open_store(cache)
    footers = read_footers(store)
    write_manifest(store, footers)
    click.echo("\n".join(summary(store, footers)))


@main.command()
@click.argument("cache")
@click.option(
    "--split",
    type=click.Choice(["train", "validation"]),
    default="train",
    show_default=True,
    help="Split to look into.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Rows that the statistics are taken from.",
)
@click.option("--row", default=0, show_default=True, help="Row to show as text.")
def inspect(cache: str, split: str, rows: int, row: int) -> None:
    """Show what CACHE holds: sizes, entropy, kept mass, agreement with the text, one row."""
    from shared.store import open_store
    from teacher_dump.inspect_cache import inspect_cache

    click.echo("\n".join(inspect_cache(open_store(cache), split, rows, row)))


@main.command()
@click.argument("cache")
@click.option("--out", required=True, help="New folder or URL.")
@click.option("--k", type=click.IntRange(min=1), help="Keep the best k ids of each position.")
def export(cache: str, out: str, k: int | None) -> None:
    """Write CACHE as Parquet files with plain list columns, for other programs."""
    from shared.store import open_store
    from teacher_dump.export_cache import export_cache

    click.echo("\n".join(export_cache(open_store(cache), open_store(out), k)))


@main.command()
@click.option("--data", multiple=True, required=True, help="Text, as for a dump.")
@click.option("--data-config", help="Configuration of a hub dataset.")
@click.option("--text-field", default="text", show_default=True, help="Field that holds the text.")
@click.option(
    "--validation-fraction",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.02,
    show_default=True,
    help="Held-out share; the tokenizer never sees it.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=257),
    default=2048,
    show_default=True,
    help="Ids: 256 bytes, <|endoftext|> and merges.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for the tokenizer's files.",
)
def tokenizer(
    data: tuple[str, ...],
    data_config: str | None,
    text_field: str,
    validation_fraction: float,
    vocab_size: int,
    out: Path,
) -> None:
    """Train a byte-level BPE tokenizer on the train documents of a corpus."""
    from teacher_dump.train_tokenizer import train_tokenizer

    train_tokenizer("\n".join(data), data_config, text_field, validation_fraction, vocab_size, out)
