"""Command line of the teacher stage: make a cache, verify one, train a tokenizer.

Nothing heavy is imported before a command runs, so `--help` answers at once.
"""

import os
from pathlib import Path
from typing import Any

import click

from shared.config import resolve, setting_options
from teacher_dump.config import DumpConfig


class _FilesAfterData(click.Group):
    """Lets `--data a.txt b.txt --out X` mean `--data a.txt --data b.txt --out X`.

    A shell expands `--data *.jsonl` to the first form, and click takes one value per option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat `--data` before each of its values, then parse as click does."""
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
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="cache",
    show_default=True,
    help="Folder of the cache.",
)
@click.option("--local_rank", type=int, hidden=True, help="Given by deepspeed; not needed.")
@click.pass_context
def main(ctx: click.Context, preset: str, out: Path, local_rank: int | None, **given: Any) -> None:
    """Run a teacher over text once and cache its top-k records as Parquet shards.

    Start it as it is, with torchrun or deepspeed (one process a GPU), or as a SLURM array: the
    workers share the shards out. The same command again makes only what is missing.
    """
    if ctx.invoked_subcommand is not None:
        return
    config = resolve(DumpConfig, "dump", preset, given)
    # Read when torch is loaded. Waiting threads that spin make a small model on a machine with
    # other work ten times slower; sleeping ones cost nothing measurable.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from teacher_dump.dump import dump

    dump(config, out)


@main.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.option(
    "--deep/--no-deep",
    default=True,
    show_default=True,
    help="Read every page and check its checksum, not only the footers.",
)
def verify(cache: Path, deep: bool) -> None:
    """Check a cache and rebuild its manifest. Exit 3 names what is damaged, missing or foreign."""
    from teacher_dump.dump import verify_cache

    verify_cache(cache, deep)


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
