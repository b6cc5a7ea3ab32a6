"""Files as streams of their content: plain, gzip, xz or zstd, told apart by their first bytes, within limits.

No limit cuts anything off: what is beyond one is refused with its name and value.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, BinaryIO, cast

from kvfold.traces.errors import BadTraceError

#: A line of a log with a prompt of a million tokens in it is 4 MB long.
LONGEST_LINE_BYTES = 1 << 24
#: A file that can only be read as one JSON document; Python needs several times as much memory for it.
LARGEST_DOCUMENT_BYTES = 1 << 30
#: All content of a packed file or archive together.
LARGEST_CONTENT_BYTES = 1 << 38
#: Content to packed size. The WEKA archive has 300:1 (block ids that count upwards); xz reaches 7,000:1 on zeros.
LARGEST_RATIO = 1000
#: Content up to here may have any ratio, since a small file of equal rows packs without end.
_FREE_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 18

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_PARQUET = b"PAR1"

#: The path that stands for standard input.
STDIN = "-"
#: Called with the bytes of the file that were read so far, and with its size.
Progress = Callable[[int, int], None]


class _Borrowed(io.BufferedReader):
    """A reader of a file that others open and close."""

    def close(self) -> None:
        """Leave the file open."""


class TraceStream(_Borrowed):
    """Content that can be read again from its start, line by line or whole; beyond a limit BadTraceError."""

    def __init__(self, raw: io.RawIOBase, source: str) -> None:
        super().__init__(raw, _CHUNK_BYTES)
        self._source = source

    def readline(self, size: int | None = -1) -> bytes:
        """One line, with its end."""
        line = super().readline(LONGEST_LINE_BYTES + 1 if size is None or size < 0 else size)
        if len(line) > LONGEST_LINE_BYTES:
            number = self._lines_before(self.tell()) + 1
            rule = f"a line must have at most {LONGEST_LINE_BYTES:,} bytes"
            raise BadTraceError(rule, f"{self._source}:{number}", "split it, or leave its texts out")
        return line

    def read(self, size: int | None = -1) -> bytes:
        """``size`` bytes, or all that is left."""
        if size is not None and size >= 0:
            return super().read(size)
        data = super().read(LARGEST_DOCUMENT_BYTES + 1)
        if len(data) > LARGEST_DOCUMENT_BYTES:
            rule = f"a file that is read whole must have at most {LARGEST_DOCUMENT_BYTES:,} bytes"
            raise BadTraceError(rule, self._source, "split it into smaller files")
        return data

    def _lines_before(self, end: int) -> int:
        self.seek(0)
        count, left = 0, end
        while left and (chunk := super().read(min(left, _CHUNK_BYTES))):
            count += chunk.count(b"\n")
            left -= len(chunk)
        return count


class TraceFile(io.FileIO):
    """A file that says how far it was read."""

    def __init__(self, file: str | int, progress: Progress | None) -> None:
        super().__init__(file, closefd=isinstance(file, str))
        self._progress = progress
        self.size = self.seek(0, io.SEEK_END)
        self.seek(0)

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if self._progress is not None:
            self._progress(self.tell(), self.size)
        return count


class _Content(io.RawIOBase):
    """The content of a packed file, which must not be more than its limits allow."""

    def __init__(self, packed: BinaryIO, packed_bytes: int, source: str, unpack: Callable[[BinaryIO], Any]):
        self._packed, self._packed_bytes, self._source, self._unpack = packed, packed_bytes, source, unpack
        self._content, self._at = unpack(packed), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._at
        if whence == io.SEEK_END or offset not in (0, self._at):
            raise io.UnsupportedOperation("packed content is read from its start")
        if offset != self._at:
            self._packed.seek(0)
            self._content, self._at = self._unpack(self._packed), 0
        return offset

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        ratio = self._at / max(1, self._packed_bytes)
        if self._at > LARGEST_CONTENT_BYTES or (self._at > _FREE_BYTES and ratio > LARGEST_RATIO):
            raise BadTraceError(
                f"packed content must be at most {LARGEST_RATIO:,} times its packed size and"
                f" {LARGEST_CONTENT_BYTES:,} bytes, got {self._at:,} bytes from {self._packed_bytes:,}",
                self._source,
                "unpack it yourself if you trust it, and name the file",
            )
        return len(data)


@contextmanager
def opened(path: str, progress: Progress | None = None) -> Iterator[TraceFile]:
    """A file that can be read twice. Standard input (``-``) and pipes are copied to one, gone afterwards.

    Raises BadTraceError for a device, OSError.
    """
    mode = 0 if path == STDIN else os.stat(path).st_mode
    if stat.S_ISREG(mode):
        with TraceFile(path, progress) as file:
            yield file
    elif path == STDIN or stat.S_ISFIFO(mode):
        with tempfile.TemporaryFile() as copy:
            with nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb") as pipe:
                while chunk := pipe.read(_CHUNK_BYTES):
                    copy.write(chunk)
            copy.flush()
            yield TraceFile(copy.fileno(), progress)
    else:
        rule = "a trace must be a file, a folder, a pattern of names or a pipe"
        raise BadTraceError(f"{rule}, got a device", path, "name a file")


def unpacked(file: io.RawIOBase | io.BytesIO, source: str) -> TraceStream:
    """The content of an open file that can seek."""
    magic = cast(bytes, file.read(len(_XZ)))
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    unpack: Callable[[BinaryIO], Any] | None = None
    if magic.startswith(_GZIP):
        unpack = lambda packed: gzip.GzipFile(fileobj=packed)  # noqa: E731
    elif magic == _XZ:
        unpack = lzma.LZMAFile
    elif magic.startswith(_ZSTD):
        unpack = _zstd
    if unpack is None:
        return TraceStream(cast(io.RawIOBase, file), source)
    packed = _Borrowed(cast(io.RawIOBase, file), _CHUNK_BYTES)
    stream = TraceStream(_Content(cast(BinaryIO, packed), size, source, unpack), source)
    if stream.peek(len(_PARQUET)).startswith(_PARQUET):  # which is read from its end
        return TraceStream(cast(io.RawIOBase, io.BytesIO(stream.read())), source)
    return stream


@contextmanager
def reported(source: str) -> Iterator[None]:
    """Errors of the file system and of unpacking become BadTraceError."""
    try:
        yield
    except FileNotFoundError:
        raise BadTraceError("a trace must exist, found no such file", source, "check the path") from None
    except (EOFError, lzma.LZMAError, tarfile.TarError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            rule = f"a trace must be readable: {error.strerror}"
            raise BadTraceError(rule, source, "check the file") from None
        raise BadTraceError(f"a packed file must be whole: {error}", source, "restore the file") from None


def _zstd(packed: BinaryIO) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd")
