"""Array files: each way in which one can be bad is named with the file, the rule and the value."""

import io
import os

import numpy as np
import pytest

from kvfold.codec.arrays import load_patterns, load_values, save_bytes, save_values
from kvfold.codec.errors import BadArrayError


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


GOOD = np.arange(2 * 5 * 8, dtype=np.uint16).reshape(2, 5, 8)


def test_patterns_come_as_they_are(tmp_path):
    path = tmp_path / "k.npy"
    path.write_bytes(npy(GOOD))
    assert np.array_equal(load_patterns(path), GOOD)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_head_axis_says_where_the_heads_are(tmp_path, axis):
    path = tmp_path / "k.npy"
    path.write_bytes(npy(np.moveaxis(GOOD, 0, axis)))
    assert np.array_equal(load_patterns(path, axis), GOOD)


def test_fortran_order_is_read(tmp_path):
    path = tmp_path / "k.npy"
    path.write_bytes(npy(np.asfortranarray(GOOD)))
    assert np.array_equal(load_patterns(path), GOOD)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "must be an .npy file", id="empty"),
        pytest.param(b"PK\x03\x04 an archive", "must be an .npy file", id="npz"),
        pytest.param(npy(np.array([{}, None])), "got pickled Python objects", id="pickled"),
        pytest.param(npy(GOOD.astype(np.float32)), "dtype must be uint16 .* got <f4", id="float32"),
        pytest.param(npy(GOOD.astype(np.uint8)), r"dtype must be uint16 .* got \|u1", id="uint8"),
        pytest.param(npy(GOOD.astype(">u2")), "dtype must be uint16 .* got >u2", id="big-endian"),
        pytest.param(npy(GOOD[0]), r"must be three axes of at least 1.* got \[5, 8\]", id="two axes"),
        pytest.param(npy(GOOD[:, :0]), r"must be three axes of at least 1.* got \[2, 0, 8\]", id="no token"),
        pytest.param(
            npy(GOOD)[:-3], "needs 160 bytes of data, got 157: the file is truncated", id="truncated"
        ),
        pytest.param(
            npy(GOOD) + b"x", "needs 160 bytes of data, got 161: the file is too long", id="too long"
        ),
        pytest.param(npy(GOOD)[:40], "the .npy header cannot be read", id="half a header"),
        pytest.param(npy(GOOD)[:7], "the .npy header cannot be read", id="half a magic"),
        pytest.param(
            npy(GOOD).replace(b"(2, 5, 8)", b"(2, 5, x)"), "the .npy header cannot be read", id="bad header"
        ),
    ],
)
def test_bad_files_are_named(tmp_path, data, message):
    path = tmp_path / "bad.npy"
    path.write_bytes(data)
    with pytest.raises(BadArrayError, match=message) as caught:
        load_patterns(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    data = npy(GOOD)
    path = tmp_path / "cut.npy"
    for kept in range(len(data)):
        path.write_bytes(data[:kept])
        with pytest.raises(BadArrayError):
            load_patterns(path)


def test_missing_file(tmp_path):
    with pytest.raises(BadArrayError, match=r"none.npy: cannot be read: No such file"):
        load_patterns(tmp_path / "none.npy")


def test_a_folder(tmp_path):
    with pytest.raises(BadArrayError, match="cannot be read: Is a directory"):
        load_patterns(tmp_path)


def test_fp8_files_are_read_where_they_are_allowed(tmp_path):
    path = tmp_path / "k.npy"
    path.write_bytes(npy(GOOD.astype(np.uint8)))
    assert load_values(path).dtype == np.uint8
    path.write_bytes(npy(GOOD))
    assert np.array_equal(load_values(path, 1), np.moveaxis(GOOD, 1, 0))
    path.write_bytes(npy(GOOD.astype(np.int8)))
    with pytest.raises(BadArrayError, match=r"must be uint16 .* or uint8 \(FP8 bit patterns\), got \|i1"):
        load_values(path)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "u1"])
def test_what_is_saved_is_read(tmp_path, dtype):
    path = tmp_path / "k.npy"
    save_values(path, GOOD.astype(dtype))
    assert np.array_equal(load_values(path), GOOD)
    assert [file.name for file in tmp_path.iterdir()] == ["k.npy"]


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    save_bytes(path, b"old")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
