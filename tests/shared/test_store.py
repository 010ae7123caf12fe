"""Caches in a local folder and by URL: the same bytes, written whole or not at all."""

import dataclasses
import logging
import uuid

import fsspec
import numpy as np
import pytest
from pyarrow.fs import FileSelector, FSSpecHandler, PyFileSystem

from shared.cache import MANIFEST, CacheReader
from shared.errors import DamagedError, UsageError
from shared.shardfile import check_shard
from shared.sidecar import INDEX, WEIGHTS, local_sidecar
from shared.store import Store, open_store

KINDS = ["path", "file", "memory", "s3"]


@pytest.fixture(scope="module")
def bucket():
    """A bucket on an S3 server of this machine, as a URL."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        creator = open_store("s3://bucket?allow_bucket_creation=true")
        creator.fs.create_dir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def location(request, tmp_path):
    """A place for a cache, where nothing is yet; parametrize it with KINDS."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{name}/cache"
    if request.param == "memory":
        return f"memory://{name}/cache"
    return f"{'file://' if request.param == 'file' else ''}{tmp_path}/{name}/cache"


everywhere = pytest.mark.parametrize("location", KINDS, indirect=True)


@everywhere
def test_a_folder_that_is_not_there_is_empty(location):
    store = open_store(location)
    assert str(store) == location
    assert store.names() == []
    assert not store.is_folder()
    assert not store.has("x")
    with pytest.raises(OSError, match="x"):
        store.read("x")


@everywhere
def test_files_are_written_read_and_replaced(location, tmp_path):
    store = open_store(location)
    store.write_text("b.json", "old")
    with store.writing("a") as path:
        assert not store.has("a")
        path.write_bytes(bytes(range(256)) * 1000)
    store.child("teacher").write_text("c", "ä")
    store.write_text("b.json", "new")
    again = open_store(location)
    assert again.names() == ["a", "b.json", "teacher"]
    assert again.is_folder()
    assert again.has("a")
    assert not again.has("teacher")
    assert not again.has("c")
    assert again.read("b.json") == b"new"
    assert again.child("teacher").read("c").decode() == "ä"
    assert again.child("teacher").names() == ["c"]
    assert again.path("a") == f"{location}/a"
    assert again.child("teacher").path("c") == f"{location}/teacher/c"
    with again.open("a") as file:
        assert file.size() == 256000
        assert file.read_at(3, 255) == b"\xff\x00\x01"
    again.fetch("a", tmp_path / "copy" / "a")
    assert (tmp_path / "copy" / "a").read_bytes() == bytes(range(256)) * 1000
    assert [p.name for p in (tmp_path / "copy").iterdir()] == ["a"]


@everywhere
def test_a_writer_that_fails_leaves_what_was_there(location):
    store = open_store(location)

    def write(name):
        with store.writing(name) as path:
            path.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write("a")
    assert store.names() == []
    store.write_text("a", "whole")
    with pytest.raises(RuntimeError, match="stop"):
        write("a")
    assert store.names() == ["a"]
    assert store.read("a") == b"whole"


@pytest.mark.parametrize(
    ("location", "local"),
    [("path", True), ("file", True), ("memory", False), ("s3", False)],
    indirect=["location"],
)
def test_only_local_folders_have_a_local_path(location, local):
    store = open_store(location)
    assert (store.local is not None) == local
    if local:
        store.write_text("a", "x")
        assert (store.local / "a").read_text() == "x"


def test_unknown_scheme():
    with pytest.raises(UsageError, match="nonsense://bucket/cache: no file system for this URL"):
        open_store("nonsense://bucket/cache")


@everywhere
def test_a_slash_at_the_end_changes_nothing(location):
    store = open_store(f"{location}/")
    store.write_text("x", "1")
    assert store.path("x") == f"{location}/x"
    assert open_store(location).read("x") == b"1"
    assert open_store(location).names() == store.names() == ["x"]


class Recorder(FSSpecHandler):
    """A file system that remembers what was written where, and what was moved."""

    def __init__(self, fs):
        super().__init__(fs)
        self.calls = []

    def open_output_stream(self, path, metadata):
        self.calls.append(f"write {path}")
        return super().open_output_stream(path, metadata)

    def move(self, src, dest):
        self.calls.append(f"move {src} {dest}")
        super().move(src, dest)


def test_what_has_no_atomic_upload_gets_a_temporary_name_first():
    recorder = Recorder(fsspec.filesystem("memory"))
    store = Store("memory://recorded", PyFileSystem(recorder), "/recorded")
    store.write_text("a", "x")
    assert recorder.calls == [
        "write /recorded/.tmp-a",
        "move /recorded/.tmp-a /recorded/a",
    ]
    assert store.names() == ["a"]


def test_writing_to_a_bucket_that_is_not_there_fails(bucket):
    with pytest.raises(OSError, match="absent"):
        open_store("s3://absent/cache").write_text("x", "1")


# A dump to a URL


@pytest.fixture(scope="module")
def config(dump_config):
    """A smaller cache than the usual: S3 has to answer for every file of it."""
    return dataclasses.replace(dump_config, max_rows=90, max_validation_rows=5)


@pytest.fixture(scope="module")
def local_cache(config, tmp_path_factory):
    """The same cache in a local folder."""
    from teacher_dump.dump import dump

    folder = tmp_path_factory.mktemp("local") / "cache"
    dump(config, folder)
    return folder


def files_of(store):
    return {name: store.read(name) for name in store.names() if store.has(name)}


@pytest.mark.parametrize("location", ["file", "s3", "memory"], indirect=True)
def test_a_dump_to_a_url_is_the_local_dump(
    location, config, local_cache, tmp_path, monkeypatch, capsys
):
    from teacher_dump.dump import dump

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    dump(config, location)
    assert "made 3 of its 3 shards" in capsys.readouterr().err
    here, there = open_store(local_cache), open_store(location)
    assert files_of(there) == files_of(here)
    assert there.names() == here.names()
    assert MANIFEST in there.names()
    for name in there.names():
        if name.endswith(".parquet"):
            check_shard(there, name)
    for split, rows in (("train", 90), ("validation", 5)):
        local, remote = (CacheReader(store, split, keep_groups=1) for store in (here, there))
        assert len(remote) == len(local) == rows
        for number in np.random.default_rng(0).permutation(rows)[:20]:
            a, b = remote.row(int(number)), local.row(int(number))
            assert a.number == b.number == number
            np.testing.assert_array_equal(a.tokens, b.tokens)
            for field, values in vars(b.record).items():
                np.testing.assert_array_equal(getattr(a.record, field), values)

    made = {i.base_name: i.mtime_ns for i in there.fs.get_file_info(FileSelector(there.root))}
    dump(config, location)
    assert "made 0 of its 3 shards" in capsys.readouterr().err
    assert files_of(there) == files_of(here)
    for info in there.fs.get_file_info(FileSelector(there.root)):
        assert info.base_name == MANIFEST or info.mtime_ns == made[info.base_name]

    folder = local_sidecar(there, remote.fingerprint)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files_of(here.child("teacher"))
    assert (folder == there.local / "teacher") if there.local else folder.is_relative_to(tmp_path)
    assert local_sidecar(there, remote.fingerprint) == folder


@pytest.mark.parametrize("location", ["path", "s3"], indirect=True)
@pytest.mark.parametrize("where", ["source", "fetched"])
def test_a_damaged_sidecar_is_refused(location, where, config, local_cache, tmp_path, monkeypatch):
    source = open_store(local_cache)
    fingerprint = CacheReader(source, "train").fingerprint
    store = open_store(location)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name, data in files_of(source.child("teacher")).items():
        with store.child("teacher").writing(name) as path:
            path.write_bytes(data)
    if where == "fetched":
        path = local_sidecar(store, fingerprint) / WEIGHTS
        bad = bytearray(path.read_bytes())
        bad[len(bad) // 2] ^= 1
        path.write_bytes(bad)
    else:
        bad = bytearray(store.child("teacher").read(WEIGHTS))
        bad[len(bad) // 2] ^= 1
        with store.child("teacher").writing(WEIGHTS) as path:
            path.write_bytes(bad)
    with pytest.raises(DamagedError, match=f"{WEIGHTS} is damaged"):
        local_sidecar(store, fingerprint)
    assert store.child("teacher").has(INDEX)


def test_a_sidecar_damaged_in_transit_is_not_kept(bucket, local_cache, tmp_path, monkeypatch):
    """Once the source is whole again, so is what is fetched."""
    source = open_store(local_cache)
    fingerprint = CacheReader(source, "train").fingerprint
    store = open_store(f"{bucket}/{uuid.uuid4().hex}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    files = files_of(source.child("teacher"))
    for damaged in (True, False):
        for name, data in files.items():
            with store.child("teacher").writing(name) as path:
                path.write_bytes(data[:-1] if damaged and name == WEIGHTS else data)
        if damaged:
            with pytest.raises(DamagedError, match=f"{WEIGHTS} is damaged"):
                local_sidecar(store, fingerprint)
            assert list((tmp_path / "home" / "stackgrow").iterdir()) == []
    folder = local_sidecar(store, fingerprint)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files


def test_a_sidecar_that_is_missing_or_of_another_teacher_is_refused(local_cache, tmp_path):
    source = open_store(local_cache)
    fingerprint = CacheReader(source, "train").fingerprint
    local_sidecar(source, fingerprint)
    other = {**fingerprint, "teacher": {**fingerprint["teacher"], "weights_sha256": "0"}}
    with pytest.raises(DamagedError, match="teacher.weights_sha256: found .*, expected '0'"):
        local_sidecar(source, other)
    with pytest.raises(DamagedError, match=f"{INDEX} is missing"):
        local_sidecar(open_store(tmp_path), fingerprint)
