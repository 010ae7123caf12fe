"""Documents of every kind, the split, and token rows."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shared.errors import UsageError
from teacher_dump.corpus import load_documents, plan_rows, token_rows


def load(data, field="text"):
    return load_documents(str(data), None, field)


def test_every_kind_of_file_gives_the_same_documents(texts, tmp_path):
    lines = "".join(json.dumps({"n": i, "body": t}) + "\n" for i, t in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps([{"body": t} for t in texts]))
    pq.write_table(pa.table({"body": texts}), tmp_path / "d.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:04d}.txt").write_text(text)
    (folder / "README.md").write_text("not a document")
    kinds = ("a.jsonl", "b.jsonl.zst", "c.json", "d.parquet", "folder", "folder/*.txt")
    for kind in kinds:
        assert list(load(tmp_path / kind, "body")) == texts, kind
    plans = {plan_rows(load(tmp_path / k, "body"), 0.1, None, None).sha256 for k in kinds}
    assert len(plans) == 1


def test_several_sources_keep_their_order_and_random_access(tmp_path):
    for name, words in (("b.jsonl", ["1"]), ("c.txt", None), ("a.jsonl", ["3", "4", "5", "6"])):
        text = "2" if words is None else "".join(json.dumps({"text": w}) + "\n" for w in words)
        (tmp_path / name).write_text(text)
    sources = "\n".join(str(tmp_path / name) for name in ("b.jsonl", "c.txt", "a.jsonl"))
    documents = load(sources)
    expected = list("123456")
    assert [documents[i] for i in range(6)] == list(documents) == expected
    for first in range(7):
        for end in range(first, 8):
            assert documents[first:end] == expected[first:end]
    with pytest.raises(IndexError):
        documents[6]


def test_split_depends_on_the_text_alone(texts):
    def held_out(documents):
        return {documents[i] for i in plan_rows(documents, 0.1, None, None).validation}

    assert held_out(texts) == held_out(texts[::-1])
    assert held_out(texts) >= held_out(texts[:120])
    by_hand = {
        t for t in texts if int(hashlib.sha256(t.encode()).hexdigest()[:8], 16) / 2**32 < 0.1
    }
    assert held_out(texts) == by_hand
    assert 10 < len(by_hand) < 45


def test_plan_keeps_order_skips_blanks_and_obeys_limits(texts):
    documents = ["", " \n\t", *texts, None]
    plan = plan_rows(documents, 0.1, None, None)
    everything = np.sort(np.concatenate([plan.train, plan.validation]))
    np.testing.assert_array_equal(everything, np.arange(2, 2 + len(texts)))
    assert (np.diff(plan.train) > 0).all()
    assert plan.train.dtype == plan.validation.dtype == np.int64

    limited = plan_rows(documents, 0.1, 50, 3)
    np.testing.assert_array_equal(limited.train, plan.train[:50])
    np.testing.assert_array_equal(limited.validation, plan.validation[:3])
    assert limited.sha256 != plan.sha256


def test_corpus_hash_changes_with_one_letter(texts):
    changed = [texts[0] + "x", *texts[1:]]
    first, second = (plan_rows(t, 0.1, None, None).sha256 for t in (texts, changed))
    assert first != second


def test_token_rows_end_once_and_are_truncated(tokenizer_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    whole, ended, long = token_rows(
        tokenizer, ["the teacher", "the teacher<|endoftext|>", "word " * 50], 20
    )
    assert whole.dtype == np.int32
    assert whole[-1] == tokenizer.eos_token_id == 0
    np.testing.assert_array_equal(whole, ended)
    assert tokenizer.decode(whole[:-1]) == "the teacher"
    assert len(long) == 20
    assert long[-1] != 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text\nx\n", "unknown extension '.csv'.*jsonl"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff\xfe"}\n', r"a\.jsonl: a text is not UTF-8"),
        ("a.jsonl", b'{"body": "x", "id": 3}\n', "no field 'text', found body, id"),
        ("a.jsonl", b'{"text": 3}\n', "holds int64, expected strings"),
        ("a.jsonl", b'{"text": ["x"]}\n', "expected strings"),
        ("a.jsonl", b"", "a.jsonl"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.parquet", b"PAR1 no", "cannot read .*a.parquet"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        plan_rows(load(tmp_path / name), 0.5, None, None)


def test_missing_data_and_folders_without_text(tmp_path):
    with pytest.raises(UsageError, match="no data at"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="no data at"):
        load(tmp_path / "*.jsonl")
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UsageError, match="none of its 1 files"):
        load(tmp_path)


def test_no_validation_rows_says_how_many_documents():
    with pytest.raises(UsageError, match=r"no validation rows: 2 documents .*corpus of 3"):
        plan_rows(["a", "b", " "], 1e-9, None, None)
    with pytest.raises(UsageError, match="no train rows"):
        plan_rows(["a", "b"], 1 - 1e-9, None, None)


def test_stdlib_gives_thousands_of_distinct_documents():
    documents = load("stdlib")
    assert len(documents) > 4000
    assert len(set(documents)) == len(documents)
