"""K/V arrays on disk: ``.npy`` files of BF16 or FP8 bit patterns, and files that appear whole or not at all."""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.codec.errors import BadArrayError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

MAGIC = b"\x93NUMPY"


def load_patterns(path: Path, head_axis: int = 0) -> NDArray[np.uint16]:
    """BF16 patterns ``uint16 [kv_head, token, head_dim]`` from a ``.npy`` file; nothing in it is executed.

    ``head_axis`` says where the file keeps the kv_head axis; the other two are token, head_dim in this order.
    Raises BadArrayError, naming file, rule and value, for anything that is not such a file: missing, no
    ``.npy``, pickled objects, another dtype or number of axes, an empty axis, too few or too many bytes.
    """
    return _load(path, head_axis, {"<u2": "uint16 (BF16 bit patterns, little-endian)"})


def load_values(path: Path, head_axis: int = 0) -> NDArray[Any]:
    """BF16 patterns ``uint16`` or FP8 patterns ``uint8``, else as ``load_patterns``."""
    dtypes = {"<u2": "uint16 (BF16 bit patterns, little-endian)", "|u1": "uint8 (FP8 bit patterns)"}
    return _load(path, head_axis, dtypes)


def save_values(path: Path, values: NDArray[Any]) -> None:
    """Write an array as ``.npy``, little-endian; the file appears whole or not at all."""
    buffer = io.BytesIO()
    np.save(buffer, values.astype(values.dtype.newbyteorder("<")), allow_pickle=False)
    save_bytes(path, buffer.getvalue())


def save_bytes(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when all of it is on disk; on an error nothing is left."""
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _load(path: Path, head_axis: int, dtypes: dict[str, str]) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            dtype, shape = _read_header(path, file)
            held_bytes = path.stat().st_size - file.tell()
    except OSError as error:
        raise BadArrayError(f"{path}: cannot be read: {error.strerror}") from None
    if dtype.hasobject:
        raise BadArrayError(f"{path}: must hold plain uint16 numbers, got pickled Python objects")
    if dtype.str not in dtypes:
        raise BadArrayError(f"{path}: dtype must be {' or '.join(dtypes.values())}, got {dtype.str}")
    if len(shape) != 3 or min(shape) < 1:
        raise BadArrayError(
            f"{path}: shape must be three axes of at least 1, [kv_head, token, head_dim], got {list(shape)}"
        )
    needed_bytes = math.prod(shape) * dtype.itemsize
    if held_bytes != needed_bytes:
        raise BadArrayError(
            f"{path}: shape {list(shape)} needs {needed_bytes} bytes of data, got {held_bytes}: "
            f"the file is {'truncated' if held_bytes < needed_bytes else 'too long'}"
        )
    return np.ascontiguousarray(np.moveaxis(np.load(path, allow_pickle=False), head_axis, 0))


def _read_header(path: Path, file: BinaryIO) -> tuple[np.dtype, tuple[int, ...]]:
    if (start := file.read(len(MAGIC))) != MAGIC:
        raise BadArrayError(f"{path}: must be an .npy file, which starts with {MAGIC!r}, got {start!r}")
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise BadArrayError(f"{path}: the .npy header cannot be read: {reason}") from None
    return dtype, shape
