"""Bench of the cache format: bytes per token, divergence and speed, beside two usual layouts.

    python tests/bench_cache.py [--logits FILE.npz] [--repeats 15]

FILE.npz holds `tokens` int32 [N], `ids` int32 [N, k] (the best first), `logits` float32 [N, k] and
`logsumexp` float32 [N], in sequences of 512. Without it the shipped teacher makes 8 192 positions.
All on one core, layouts in turn; speeds are medians, ratios are medians of ratios within a turn.
Divergence is KL(original || decoded) over the kept ids and the tail, both made to sum to 1.
"""

import os
import platform
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["OMP_NUM_THREADS"] = "1"

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from shared import codec, shardfile
from shared.records import Row, Sample, TopK
from shared.store import open_store

SEQUENCE = 512
POSITIONS = 8192  # of the shipped teacher
DRAWS = 50
MIN_PROB = 3e-4


@dataclass(frozen=True)
class Positions:
    """Teacher distributions of N positions, as they came from the teacher."""

    tokens: np.ndarray  # int32 [N]
    record: TopK | Sample

    def part(self, start: int, end: int) -> "Positions":
        """Positions start to end."""
        fields = {name: values[start:end] for name, values in vars(self.record).items()}
        return Positions(self.tokens[start:end], type(self.record)(**fields))


def read_logits(path: Path) -> Positions:
    """Positions of an .npz file; see the module's head."""
    with np.load(path) as file:
        tokens, ids, logits, lse = (file[n] for n in ("tokens", "ids", "logits", "logsumexp"))
    logprobs = logits.astype(np.float64) - lse[:, None].astype(np.float64)
    tail = np.log(np.maximum(1 - np.exp(logprobs).sum(1), 1e-7))
    kept = np.full(len(ids), ids.shape[1], np.int32)
    return Positions(
        tokens, TopK(ids, logprobs.astype(np.float32), kept, tail.astype(np.float32), lse)
    )


def shipped_teacher_logits() -> Positions:
    """The best 64 of the shipped teacher over the standard library's validation documents."""
    from shared.config import resolve
    from teacher_dump.config import DumpConfig
    from teacher_dump.corpus import token_rows
    from teacher_dump.dump import prepare
    from teacher_dump.recording import topk_records
    from teacher_dump.teacher import load_teacher

    given = {"k": 64, "max_rows": 1, "shards": 1, "max_validation_rows": 200}
    job = prepare(resolve(DumpConfig, "dump", "tiny", given))
    teacher = load_teacher(job.teacher_folder, "float32", job.fingerprint["token_ids"])
    texts = [job.documents[int(number)] for number in job.plan.validation]
    rows = [r for r in token_rows(job.tokenizer, texts, job.config.max_length) if len(r) > 1]
    records = [topk_records(teacher, [row], 64, SEQUENCE)[0] for row in rows]
    fields = {name: np.concatenate([vars(r)[name] for r in records]) for name in vars(records[0])}
    return Positions(np.concatenate([r[:-1] for r in rows]), TopK(**fields)).part(0, POSITIONS)


def draws(positions: Positions) -> Sample:
    """DRAWS draws at each position. One from the tail gets an id that is rare elsewhere."""
    rng, record = np.random.default_rng(0), positions.record
    n, k = record.ids.shape
    p = np.exp(np.column_stack([record.logprobs, record.tail_logprob]).astype(np.float64))
    counts = rng.multinomial(DRAWS, p / p.sum(1, keepdims=True))
    rare = record.ids[rng.integers(0, n, (n, DRAWS)), rng.integers(k // 2, k, (n, DRAWS))]
    ids, drawn = np.zeros((n, DRAWS), np.int32), np.zeros((n, DRAWS), np.int32)
    for i in range(n):
        every = np.concatenate([np.repeat(record.ids[i], counts[i, :k]), rare[i, : counts[i, k]]])
        distinct, times = np.unique(every, return_counts=True)
        ids[i], drawn[i, : len(distinct)] = distinct[0], times
        ids[i, : len(distinct)] = distinct
    width = (drawn > 0).sum(1).max()
    return Sample(ids[:, :width], drawn[:, :width])


# Layouts: write positions to a file, and read them back as records of consecutive positions


class Lists:
    """Parquet, a line per position: lists of int32 and float32, zstd, every default."""

    name = "Parquet lists"

    def write(self, positions: Positions, path: Path) -> None:
        record = positions.record
        columns = {
            "ids": _list_column(record.ids),
            "logprobs": _list_column(record.logprobs),
            "tail": record.tail_logprob,
            "logsumexp": record.logsumexp,
        }
        pq.write_table(pa.table(columns), path, compression="zstd")

    def read(self, path: Path) -> list[TopK]:
        table = pq.read_table(path, use_threads=False)
        ids, logprobs = (
            table[name].combine_chunks().values.to_numpy().reshape(table.num_rows, -1)
            for name in ("ids", "logprobs")
        )
        kept = np.full(len(ids), ids.shape[1], np.int32)
        tail, logsumexp = table["tail"].to_numpy(), table["logsumexp"].to_numpy()
        return [TopK(ids, logprobs, kept, tail, logsumexp)]

    def bytes(self, path: Path) -> dict[str, int]:
        return {"file": path.stat().st_size}


class Halves:
    """fp16 values, ids as uint16 and the bits above them packed, zstd-3, a frame per sequence."""

    name = "fp16, bit-packed ids"

    def write(self, positions: Positions, path: Path) -> None:
        compress, record = zstandard.ZstdCompressor(3).compress, positions.record
        high_bits = max(1, int(record.ids.max()).bit_length() - 16)
        with path.open("wb") as file:
            for start in range(0, len(record.ids), SEQUENCE):
                part = positions.part(start, start + SEQUENCE).record
                high = (part.ids >> 16).astype(np.uint8)
                bits = np.unpackbits(high[..., None], axis=-1, bitorder="little")[..., :high_bits]
                values = (part.logprobs, part.tail_logprob, part.logsumexp)
                arrays = [value.astype(np.float16) for value in values]
                arrays += [part.ids.astype(np.uint16), np.packbits(bits)]
                frame = compress(b"".join(array.tobytes() for array in arrays))
                file.write(struct.pack("<4i", len(frame), *part.ids.shape, high_bits) + frame)

    def read(self, path: Path) -> list[TopK]:
        decompress, file, parts = zstandard.ZstdDecompressor().decompress, path.open("rb"), []
        with file:
            while head := file.read(16):
                size, n, k, high_bits = struct.unpack("<4i", head)
                data = decompress(file.read(size))
                values = np.frombuffer(data, np.float16, n * k + 2 * n).astype(np.float32)
                at = values.size * 2
                low = np.frombuffer(data, np.uint16, n * k, at).astype(np.int32)
                packed = np.frombuffer(data, np.uint8, offset=at + low.size * 2)
                bits = np.unpackbits(packed, count=n * k * high_bits).reshape(-1, high_bits)
                high = (bits.astype(np.int32) << np.arange(high_bits, dtype=np.int32)).sum(1)
                ids = (low | high.astype(np.int32) << 16).reshape(n, k)
                logprobs, tail, lse = np.split(values, [n * k, n * k + n])
                kept = np.full(n, k, np.int32)
                parts.append(TopK(ids, logprobs.reshape(n, k), kept, tail, lse))
        return parts

    def bytes(self, path: Path) -> dict[str, int]:
        return {"file": path.stat().st_size}


class Shards:
    """A shard of this product's cache: topk, cut off at a probability, or draws."""

    def __init__(self, name: str, kind: str, min_prob: float | None = None) -> None:
        self.name, self._kind, self._min_prob = name, kind, min_prob

    def write(self, positions: Positions, path: Path) -> None:
        count = -(-len(positions.tokens) // SEQUENCE)
        shard = shardfile.Shard("train", 0, 1, 0, count)
        fingerprint = {"format": shardfile.FORMAT_VERSION, "kind": self._kind}
        rows = list(self._rows(positions))
        groups = [rows[i : i + 64] for i in range(0, len(rows), 64)]
        with path.open("wb") as file:
            shardfile.write_parquet(file, shard, fingerprint, groups)

    def _rows(self, positions: Positions) -> Iterator[Row]:
        for number, start in enumerate(range(0, len(positions.tokens), SEQUENCE)):
            part = positions.part(start, start + SEQUENCE)
            record = part.record.truncate(self._min_prob, None) if self._min_prob else part.record
            yield Row(number, np.append(part.tokens, np.int32(0)), record)

    def read(self, path: Path) -> list[TopK] | list[Sample]:
        store, records = open_store(path.parent), []
        footer = shardfile.read_footer(store, path.name)
        with store.open(path.name) as file:
            for index in range(len(footer.groups)):
                group = codec.Group(shardfile.read_group(file, footer, index), self._kind)
                records += [group.row(i).record for i in range(len(group))]
        return records

    def bytes(self, path: Path) -> dict[str, int]:
        """By column; the input ids apart, which the other layouts do not hold."""
        parquet, sizes = pq.read_metadata(path), {}
        for group in map(parquet.row_group, range(parquet.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema.split(".")[0]
                sizes[name] = sizes.get(name, 0) + column.total_compressed_size
        rest = path.stat().st_size - sum(sizes.values())
        del sizes["tokens"]
        return sizes | {"footer": rest}


def _list_column(matrix: np.ndarray) -> pa.ListArray:
    offsets = np.arange(0, matrix.size + 1, matrix.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(matrix).ravel()))


# What is measured


def divergence(original: TopK, decoded: list[TopK]) -> np.ndarray:
    """KL(original || decoded) at each position, nats. Raises SystemExit if the ids differ."""
    result, at = [], 0
    for found in decoded:
        end = at + len(found.ids)
        fields = {name: values[at:end] for name, values in vars(original).items()}
        expected, at = TopK(**fields).keep(found.kept), end
        if not np.array_equal(expected.ids, found.ids):
            raise SystemExit("the ids that were read are not the ones that were written")
        p, q = (
            np.exp(np.column_stack([r.logprobs, r.tail_logprob]).astype(np.float64))
            for r in (expected, found)
        )
        p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
        with np.errstate(divide="ignore", invalid="ignore"):  # nothing outside the ids: 0 log 0
            result.append(np.where(p > 0, p * np.log(p / q), 0).sum(1))
    return np.concatenate(result)


def every_draw(records: list[Sample]) -> np.ndarray:
    """(position, id, count) of all draws, in order."""
    parts, start = [], 0
    for record in records:
        position, rank = np.nonzero(record.counts)
        ids, counts = record.ids[position, rank], record.counts[position, rank]
        parts.append(np.column_stack([position + start, ids, counts]))
        start += len(record.ids)
    return np.unique(np.concatenate(parts), axis=0)


def sizes(layout: Lists | Halves | Shards, positions: Positions, folder: Path) -> list[float]:
    """Bytes per token: all positions, the first half, the second half."""
    n, result = len(positions.tokens), []
    for start, end in ((0, n), (0, n // 2), (n // 2, n)):
        path = shard_path(folder, end - start)
        layout.write(positions.part(start, end), path)
        result.append(sum(layout.bytes(path).values()) / (end - start))
    return result


def shard_path(folder: Path, positions: int) -> Path:
    """Where a layout's file lies: a shard is read under its own name only."""
    return folder / shardfile.Shard("train", 0, 1, 0, -(-positions // SEQUENCE)).name


def seconds(function: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@click.command()
@click.option(
    "--logits",
    type=click.Path(exists=True, path_type=Path),
    help="An .npz file; see the head of this script.",
)
@click.option("--repeats", default=15, help="How often each layout is written and read.")
def main(logits: Path | None, repeats: int) -> None:
    """Bytes, divergence and speed of the cache format, beside two usual layouts."""
    topk = read_logits(logits) if logits else shipped_teacher_logits()
    sample = Positions(topk.tokens, draws(topk))
    n, k = topk.record.ids.shape
    ours = Shards("this cache", "topk")
    cases: list[tuple[Lists | Halves | Shards, Positions]] = [
        (Lists(), topk),
        (Halves(), topk),
        (ours, topk),
        (Shards(f"  --min-prob {MIN_PROB:g}", "topk", MIN_PROB), topk),
        (Shards(f"  --kind sample, N = {DRAWS}", "sample"), sample),
    ]
    click.echo(f"{logits.name if logits else 'the shipped teacher'}: {n} positions, k = {k}")
    click.echo(
        f"{cpu_name()}, one core; Python {platform.python_version()}, pyarrow {pa.__version__}"
    )
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(i)) for i in range(len(cases))]
        for folder in folders:
            folder.mkdir()
        measured = [sizes(*case, folder) for case, folder in zip(cases, folders, strict=True)]
        paths = [shard_path(folder, n) for folder in folders]
        encode, decode = (np.zeros((repeats, len(cases))) for _ in range(2))
        for turn in range(repeats):
            for i, ((layout, what), path) in enumerate(zip(cases, paths, strict=True)):
                encode[turn, i] = seconds(layout.write, what, path)
                decode[turn, i] = seconds(layout.read, path)
        click.echo(
            f"\n{'':24}{'B/token':>8}{'halves':>14}{'KL mean':>9}{'p99':>9}"
            f"{'encode':>15}{'decode':>15}  tokens/s (x fp16)"
        )
        for i, ((layout, what), path) in enumerate(zip(cases, paths, strict=True)):
            read = layout.read(path)
            if what is sample:
                if not np.array_equal(every_draw([sample.record]), every_draw(read)):
                    raise SystemExit("the draws that were read are not the ones that were written")
                kl = f"{'exact':>9}{'exact':>9}"
            else:
                nats = divergence(topk.record, read)
                kl = f"{nats.mean():9.1e}{np.quantile(nats, 0.99):9.1e}"
            speeds = "".join(
                f"{n / statistics.median(t[:, i]) / 1e3:8.0f}k"
                f"{statistics.median(t[:, 1] / t[:, i]):5.2f}x"
                for t in (encode, decode)
            )
            whole, first, second = measured[i]
            click.echo(f"{layout.name:24}{whole:8.1f}{first:7.1f}{second:7.1f}{kl}{speeds}")
        split = sorted(ours.bytes(paths[2]).items(), key=lambda item: -item[1])
        click.echo(
            "\nthis cache, B/token by column: "
            + ", ".join(f"{name} {size / n:.2f}" for name, size in split)
        )


if __name__ == "__main__":
    main()
