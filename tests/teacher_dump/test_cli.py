"""The command line: help, exit codes, and one message per fault."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shared.config import load_preset
from teacher_dump.cli import main

ROOT = Path(__file__).parents[2]


def shard_paths(folder):
    return sorted(folder.glob("[tv]*.parquet"))


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def small(teacher_dir, corpus, tmp_path):
    """Options of a dump that would work, to break one by one."""
    return [
        "--preset",
        "tiny",
        "--teacher",
        teacher_dir,
        "--data",
        corpus,
        "--shards",
        2,
        "--validation-fraction",
        0.1,
        "--max-rows",
        20,
        "--max-validation-rows",
        4,
        "--k",
        8,
        "--max-length",
        32,
        "--out",
        tmp_path / "cache",
    ]


def test_help_lists_preset_values_and_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from teacher_dump.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for shown in (
        f"paper: {load_preset('paper', 'dump')['shards']}",
        "Qwen/Qwen3-8B-Base",
        "verify",
        "tokenizer",
        "--out",
    ):
        assert shown in " ".join(done.stdout.split())
    assert "local_rank" not in done.stdout


def test_dump_then_verify(small, tmp_path):
    done = run(*small)
    assert done.exit_code == 0, done.output
    assert "train: 2 shards, 20 rows" in done.output
    assert "bytes/token" in done.output
    done = run("verify", tmp_path / "cache")
    assert done.exit_code == 0
    assert "validation: 1 shards, 4 rows" in done.output

    shard = shard_paths(tmp_path / "cache")[0]
    shard.write_bytes(shard.read_bytes()[:100])
    done = run("verify", tmp_path / "cache")
    assert done.exit_code == 3
    assert shard.name in done.output
    shard.unlink()
    done = run("verify", tmp_path / "cache")
    assert done.exit_code == 3
    assert [line.split()[-1] for line in done.output.splitlines() if shard.name in line] == [
        "missing"
    ]
    done = run("manifest", tmp_path / "cache")
    assert done.exit_code == 3
    assert f"missing {shard.name}" in done.output


def test_manifest_inspect_export_and_deep(small, teacher_dir, tmp_path):
    assert run(*small).exit_code == 0
    cache = tmp_path / "cache"
    written = (cache / "manifest.json").read_bytes()
    (cache / "manifest.json").write_text("{")
    done = run("manifest", cache)
    assert done.exit_code == 0
    assert (cache / "manifest.json").read_bytes() == written
    done = run("verify", cache, "--deep", "--teacher", teacher_dir, "--rows", 3)
    assert done.exit_code == 0, done.output
    assert "6 rows computed again: KL mean" in done.output
    done = run("inspect", cache, "--rows", 5, "--row", 2)
    assert done.exit_code == 0, done.output
    assert "entropy" in done.output
    done = run("export", cache, "--out", tmp_path / "plain", "--k", 4)
    assert done.exit_code == 0, done.output
    assert len(shard_paths(tmp_path / "plain")) == 3
    assert run("export", cache, "--out", tmp_path / "plain").exit_code == 2
    for command in ("verify", "manifest", "inspect"):
        done = run(command, tmp_path / "none")
        assert (done.exit_code, "no cache at" in done.output) == (2, True)


def test_data_takes_several_files(small, tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(8)]
    for path in files:
        path.write_text(f"document {path.stem}")
    at = small.index("--data")
    one = ["--validation-fraction", 0.5, "--shards", 1]
    outs = []
    for data in (["--data", *files], [x for f in files for x in ("--data", f)]):
        out = tmp_path / f"cache{len(outs)}"
        done = run(*small[:at], *data, *small[at + 2 :], *one, "--out", out)
        assert done.exit_code == 0, done.output
        outs.append([path.read_bytes() for path in shard_paths(out)])
    assert outs[0] == outs[1]


def broken_teacher(folder, source, without):
    shutil.copytree(source, folder)
    for path in folder.glob(without):
        path.unlink()
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "{tmp}/absent.jsonl"], "no data at"),
        (["--text-field", "body"], "no field 'body', found text"),
        (["--teacher", "{tmp}/absent"], "no directory"),
        (["--teacher", "{tmp}"], "has no tokenizer"),
        (["--shards", "21"], "21 train shards for 20 rows: expected 1 to 20"),
        (["--k", "300"], "k: found 300, expected less than the token ids, 300"),
        (["--k", "0"], "k: found 0, expected at least 1"),
        (["--k", "70000"], "k: found 70000, expected at most 65535"),
        (["--min-prob", "1.5"], "min_prob: found 1.5, expected between 0 and 1"),
        (["--kind", "sample", "--top-p", "0.9"], "top_p is for kind topk, found kind sample"),
        (["--kind", "sample", "--samples", "0"], "samples: found 0, expected at least 1"),
        (["--out", "nowhere://bucket/cache"], "no file system for this URL"),
        (["--max-length", "1"], "max_length: found 1, expected at least 2"),
        (["--validation-fraction", "1.5"], "expected between 0 and 1"),
        (["--validation-fraction", "1e-9"], "no validation rows: 240 documents"),
        (["--kind", "everything"], "topk"),
        (["--preset", "huge"], "no preset 'huge'"),
        (["--shards", "many"], "not a valid integer"),
    ],
)
def test_bad_options_exit_2_and_write_nothing(small, tmp_path, options, message):
    done = run(*small, *(option.format(tmp=tmp_path) for option in options))
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("config.json", "no config.json"),
        ("*.safetensors", "no *.safetensors"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
def test_incomplete_teachers_exit_2(small, teacher_dir, tmp_path, without, message):
    folder = broken_teacher(tmp_path / "broken", teacher_dir, without)
    done = run(*small, "--teacher", folder)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "cache").exists()


def test_tokenizer_larger_than_the_vocabulary_exits_2(small, corpus, tmp_path):
    done = run("tokenizer", "--data", corpus, "--vocab-size", 340, "--out", tmp_path / "large")
    assert done.exit_code == 0, done.output
    done = run(*small, "--tokenizer", tmp_path / "large")
    assert done.exit_code == 2
    assert "340 ids" in done.output
    assert "320" in done.output


def test_tokens_without_a_tokenizer_exit_2(corpus):
    done = run("--preset", "tiny-teacher", "--data", corpus)
    assert done.exit_code == 2
    assert "give --tokenizer or --teacher" in done.output


def test_a_foreign_cache_exits_3(small, tmp_path):
    assert run(*small).exit_code == 0
    done = run(*small, "--k", 9)
    assert done.exit_code == 3
    assert "k: found 8, expected 9" in done.output


def test_without_network_a_hub_name_is_refused_soon(teacher_dir, tmp_path):
    # A proxy that refuses connections is what no network looks like, on any machine.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path),
        "https_proxy": "http://127.0.0.1:9",
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    for teacher, data, advice in (
        ("nobody/nothing", "stdlib", "give --teacher DIR"),
        (str(teacher_dir), "nobody/nothing", "give --data FILES, or try --preset tiny"),
    ):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "teacher_dump",
                "--teacher",
                teacher,
                "--data",
                data,
                "--k",
                "8",
                "--out",
                str(tmp_path / "cache"),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert "could not load nobody/nothing from the hub (offline?)" in done.stderr
        assert advice in done.stderr
        assert "Traceback" not in done.stderr
        assert "Retry" not in done.stderr


def test_tokenizer_command(corpus, tmp_path):
    from transformers import AutoTokenizer

    options = ["tokenizer", "--data", corpus, "--vocab-size", 300, "--out"]
    done = run(*options, tmp_path / "a")
    assert done.exit_code == 0, done.output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == 300
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    for text in ("plain words", "caf\u00e9 \u4e2d\u6587 \x00\x7f", "  two  spaces\n\ttab"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert run(*options, tmp_path / "b").exit_code == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    done = run(*options, tmp_path / "a")
    assert done.exit_code == 2
    assert "already holds a tokenizer" in done.output


def test_tokenizer_never_sees_held_out_documents(tmp_path):
    from teacher_dump.corpus import load_documents, plan_rows

    (tmp_path / "d").mkdir()
    for i in range(40):
        (tmp_path / "d" / f"{i:02d}.txt").write_text(f"document {i}")
    plan = plan_rows(load_documents(str(tmp_path / "d"), None, "text"), 0.5, None, None)
    held_out = [sorted((tmp_path / "d").iterdir())[n] for n in plan.validation]
    assert held_out
    files = {}
    for out, extra in (("a", ""), ("b", None)):
        if extra is None:
            for path in held_out:
                path.unlink()
            (tmp_path / "d" / "one_held_out.txt").write_text(
                next(t for t in (f"document {i}" for i in range(40, 99)) if _held_out(t))
            )
        done = run(
            "tokenizer",
            "--data",
            tmp_path / "d",
            "--vocab-size",
            280,
            "--validation-fraction",
            0.5,
            "--out",
            tmp_path / out,
        )
        assert done.exit_code == 0, done.output
        files[out] = (tmp_path / out / "tokenizer.json").read_bytes()
    assert files["a"] == files["b"]


def _held_out(text):
    import hashlib

    from teacher_dump.corpus import is_validation

    return is_validation(hashlib.sha256(text.encode()).digest(), 0.5)
