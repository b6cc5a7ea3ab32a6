"""One way in: the format comes from the content, and nothing unusable passes silently."""

import gzip
import hashlib
import io
import lzma
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.sniff import sniff

FLAT = b"arrival_time_s,input_tokens,output_tokens\n0,10,5\n1,20,5\n"
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-01-01 00:00:00.0000000,7,1"
MOONCAKE = b'{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'
WEKA = (
    b'{"id": "a", "block_size": 64, "hash_id_scope": "local", "totals": {}, "requests": [{"t": 0.0, "type": "n",'
    b' "in": 64, "out": 1, "hash_ids": [1], "input_types": ["text"], "stop": "end_turn"}]}'
)
ROW = b'{"arrival_time_s": 1.5, "input_tokens": 10, "output_tokens": 5}\n'
SAMPLES = {"azure": AZURE, "mooncake": MOONCAKE, "weka": WEKA, "canonical": FLAT}


@pytest.mark.parametrize("format", SAMPLES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_the_format_comes_from_the_content(tmp_path, format, pack):
    path = tmp_path / "mooncake.azure.jsonl.zip"  # a name that lies
    path.write_bytes(pack(SAMPLES[format]))
    trace = load(path)
    assert trace.meta.format == format
    assert trace.meta.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert load(path, format).meta == trace.meta


def test_a_binary_file_is_told_by_its_first_bytes():
    read = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal read
            data = super().read(size)
            read += len(data)
            return data

        readline = read

    assert sniff(Counted(bytes(1 << 20)), "binary") is None
    assert read <= 4096


def test_flat_rows_of_json_need_no_header(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(ROW + b"\n" + ROW)
    trace = load(path)
    assert (trace.meta.format, trace.source_row.tolist()) == ("canonical", [1, 3])


@pytest.mark.parametrize("format", ["mooncake", "weka", "canonical"])
def test_a_byte_order_mark_changes_nothing(tmp_path, format):
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf" + SAMPLES[format])
    assert load(path).meta.format == format


@pytest.mark.parametrize(
    ("content", "rule", "line"),
    [
        (b"", "got an empty file", None),
        (b"\x00\x01\x02\x03" * 100, "got a binary file", None),
        (b"\x7fELF" + bytes(300), "got a binary file", None),
        (
            b"num_prefill_tokens,num_decode_tokens\n10,5\n",
            "needs arrival times, but the column arrived_at",
            1,
        ),
        (b"hello\n", "one of the formats azure, .* weka, got 'hello'", 1),
        (b"[1, 2]", "one of the formats", 1),
        (b'{"a": 1}', "one of the formats", 1),
        (b'{"timestamp": 5, "input_le', "one whole JSON object", 1),
        (b'{"a": ' + b"[" * 100_000, "nested without end", 1),
        (WEKA[:-40], "one whole JSON object", 1),
        (b'{\n"id": "a",\n"requests": [\n{]}', "one whole JSON object", 4),
        (MOONCAKE + MOONCAKE[:20], "one whole JSON object", 2),
        (AZURE[:-9], "a row must be", 2),
        (gzip.compress(FLAT)[:-12], "a packed file must be whole", None),
        (lzma.compress(FLAT)[:-12], "a packed file must be whole", None),
        (b"\x1f\x8bnot gzip", "a packed file must be whole", None),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path, content, rule, line):
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(BadTraceError, match=rule) as caught:
        load(path)
    assert caught.value.place == (str(path) if line is None else f"{path}:{line}")
    assert caught.value.mend
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_never_replaced_by_another(tmp_path):
    with pytest.raises(BadTraceError, match="found no such file"):
        load(tmp_path / "conversation_trcae.jsonl")


def test_a_stated_format_is_obeyed(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(FLAT)
    with pytest.raises(BadTraceError, match="the header must be TIMESTAMP"):
        load(path, "azure")
    with pytest.raises(ValueError, match=r"format must be one of azure, .* weka, got vidure"):
        load(path, "vidure")


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(BadTraceError, match="must hold trace files, got none in 0 files"):
        load(tmp_path)
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(BadTraceError, match="must hold trace files, got none in 1 files"):
        load(tmp_path)


def test_a_folder_holds_one_file_or_sessions(tmp_path):
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / "conv.csv").write_bytes(AZURE)
    trace = load(tmp_path)
    assert trace.meta.format == "azure"
    assert "1 files are no traces, left out: LICENSE" in trace.meta.warnings
    (tmp_path / "code.csv").write_bytes(AZURE)
    with pytest.raises(BadTraceError, match=r"must hold one file, got code.csv and conv.csv"):
        load(tmp_path)


def test_a_folder_of_two_formats_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(WEKA)
    (tmp_path / "b.csv").write_bytes(AZURE)
    with pytest.raises(BadTraceError, match=r"b.csv: all files must be weka traces, got one of azure"):
        load(tmp_path)


def test_one_damaged_session_in_a_folder_is_named_not_skipped(tmp_path):
    (tmp_path / "a.json").write_bytes(WEKA)
    (tmp_path / "b.json").write_bytes(WEKA[:-40])
    with pytest.raises(BadTraceError) as caught:
        load(tmp_path)
    assert caught.value.place == "b.json:1"


def test_empty_files_and_archives_in_a_folder_are_named(tmp_path):
    (tmp_path / "a.json").write_bytes(WEKA)
    (tmp_path / "b.json").write_bytes(b"")
    with tarfile.open(tmp_path / "c.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "a.json", "a.json")
    assert "2 files are no traces, left out: b.json, c.tar.xz" in load(tmp_path).meta.warnings


def test_a_cut_off_archive_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(WEKA)
    path = tmp_path / "t.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for at in range(50):
            archive.add(tmp_path / "a.json", f"{at}.json")
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(BadTraceError, match="a packed file must be whole"):
        load(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_raises_only_the_one_error(tmp_path_factory, data):
    """A byte changed, text put in, or the end cut off: the file loads or it is named, never a crash."""
    content = data.draw(st.sampled_from([*SAMPLES.values(), ROW * 3]))
    at = data.draw(st.integers(0, len(content)))
    put = data.draw(
        st.sampled_from(
            [b"", b"-1", b"1e999", b"NaN", b"null", b"{", b"]", b"9" * 20, b"\xff", b"\0", b"\n", b'"']
        )
    )
    after = data.draw(st.sampled_from([at, at + 1, at + 5, len(content)]))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content[:at] + put + content[after:])
    try:
        trace = load(path)
    except BadTraceError as error:
        line = str(error)
    else:
        line = f"{path}: sound"
        assert trace.meta.rows_kept == len(trace) >= 1
    assert line.startswith(str(path))
    assert "\n" not in line


def test_gaps_that_are_all_equal_are_remarked(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"{at}.000,10,5\n" for at in range(250))
    path.write_text("arrival_time_s,input_tokens,output_tokens\n" + rows)
    assert any("99 % of the gaps are 1 s" in warning for warning in load(path).meta.warnings)
