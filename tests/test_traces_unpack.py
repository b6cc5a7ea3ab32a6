"""Packed and large input: read as what it holds, or refused by a rule that names the limit."""

import gzip
import io
import lzma
import os
import tarfile
import threading
import zipfile

import pyarrow as pa
import pytest

from kvfold.traces import canonical, synth, unpack
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load

FLAT = b"arrival_time_s,input_tokens,output_tokens\n0,10,5\n1,20,5\n"


def zstd(data):
    return pa.Codec("zstd").compress(data).to_pybytes()


def tar(pack, *files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{pack}") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.csv", FLAT)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        zstd(FLAT),
        gzip.compress(FLAT[:20]) + gzip.compress(FLAT[20:]),
        tar("", ("a.csv", FLAT)),
        tar("gz", ("a.csv", FLAT), ("LICENSE", b"free")),
        tar("xz", ("a.csv.gz", gzip.compress(FLAT))),
        zstd(tar("", ("a.csv.zst", zstd(FLAT)))),
    ],
    ids=["zst", "two gzip members", "tar", "tar.gz", "gz in tar.xz", "zst in tar.zst"],
)
def test_packed_files_are_read(tmp_path, content):
    path = tmp_path / "t"
    path.write_bytes(content)
    assert load(path).input_tokens.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (zstd(FLAT)[:-4], "a packed file must be whole: Truncated"),
        (zstd(FLAT) + b"junk", "a packed file must be whole"),
        (zipped(), "got a zip archive; unpack it, or pack the files as .tar.gz"),
        (tar("gz", ("a.csv", FLAT + b"x,1,1\n")), "^a.csv:4: arrival_time_s: expected float"),
    ],
    ids=["cut off", "trailing bytes", "zip", "a bad row in an archive"],
)
def test_what_is_not_whole_is_one_line(tmp_path, content, rule):
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(BadTraceError, match=rule) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstd])
def test_a_bomb_is_refused_by_ratio(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(unpack, "_FREE_BYTES", 1 << 16)
    monkeypatch.setattr(unpack, "LARGEST_RATIO", 50)
    path = tmp_path / "t"
    path.write_bytes(pack(FLAT + b"2,20,5\n" * 100_000))
    with pytest.raises(BadTraceError, match=r"at most 50 times its packed size and .* bytes, got"):
        load(path)


def test_a_bomb_is_refused_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "LARGEST_CONTENT_BYTES", 1000)
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(FLAT + b"2,20,5\n" * 1000))
    with pytest.raises(BadTraceError, match="and 1,000 bytes, got"):
        load(path)


def test_the_limits_admit_the_real_archive(shared_data):
    archive = next((shared_data / "traces").rglob("all710_original.tar.xz"))
    with unpack.opened(str(archive)) as file, unpack.unpacked(file, "a") as stream:
        size = sum(len(chunk) for chunk in iter(lambda: stream.read(1 << 20), b""))
    assert 100 < size / archive.stat().st_size < unpack.LARGEST_RATIO


def test_a_line_of_a_megabyte_is_read_and_one_beyond_the_limit_named(tmp_path, monkeypatch):
    path = tmp_path / "t"
    row = b'{"arrival_time_s": 0, "input_tokens": 1, "output_tokens": 1, "model": "%s"}\n'
    path.write_bytes(row % b"a" + row % (b"m" * 2**20))
    assert len(load(path).model[1]) == 2**20
    monkeypatch.setattr(unpack, "LONGEST_LINE_BYTES", 2**20)
    with pytest.raises(BadTraceError, match="a line must have at most 1,048,576 bytes") as caught:
        load(path)
    assert caught.value.place == f"{path}:2"


def test_a_document_beyond_the_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "LARGEST_DOCUMENT_BYTES", 100)
    path = tmp_path / "t"
    path.write_bytes(
        b'{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [' + b" " * 200 + b"]}"
    )
    with pytest.raises(BadTraceError, match="a file that is read whole must have at most 100 bytes"):
        load(path)


def test_a_pattern_stands_for_its_files(tmp_path):
    (tmp_path / "a.csv").write_bytes(FLAT)
    (tmp_path / "b.txt").write_bytes(b"no trace")
    assert len(load(str(tmp_path / "*.csv"))) == 2
    with pytest.raises(BadTraceError, match="got none in 0 files"):
        load(str(tmp_path / "*.jsonl"))
    (tmp_path / "[x].csv").write_bytes(FLAT)
    assert len(load(tmp_path / "[x].csv")) == 2


def test_a_pipe_is_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(FLAT))
    writer.start()
    assert len(load(path)) == 2
    writer.join()


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstd])
def test_packed_parquet_is_read(tmp_path, pack):
    canonical.write(synth.poisson(20, 1, 100, 5, seed=1), tmp_path / "t.parquet")
    (tmp_path / "t").write_bytes(pack((tmp_path / "t.parquet").read_bytes()))
    assert len(load(tmp_path / "t")) == 20


def test_standard_input_is_read(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(gzip.compress(FLAT))

    monkeypatch.setattr("sys.stdin", Stdin)
    trace = load("-")
    assert (len(trace), trace.meta.source) == (2, "-")


def test_a_device_is_refused():
    with pytest.raises(BadTraceError, match="got a device"):
        load("/dev/zero")


def test_reading_tells_how_far_it_is(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(FLAT + b"2,20,5\n" * 40_000)
    seen = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size,) * 2
