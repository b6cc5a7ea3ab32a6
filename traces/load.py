"""One way in: a file, a folder or an archive of any known format to a Trace."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from kvfold.traces import azure, canonical, mooncake, weka
from kvfold.traces.columns import with_warnings
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sniff import FORMATS, sniff
from kvfold.traces.table import Trace

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
#: Offset and text of the magic of a tar archive (POSIX.1-1988, ustar).
_TAR_AT, _TAR = 257, b"ustar"
_READERS: dict[str, Callable[[BinaryIO, str], Trace]] = {
    "azure": azure.read,
    "mooncake": mooncake.read,
    "canonical": canonical.read,
}


def load(path: str | Path, format: str | None = None) -> Trace:
    """Read the trace at ``path``: a file, a folder, a tar archive; plain, gzip or xz.

    ``format`` is one of FORMATS; None finds it from the content. A folder or archive holds the sessions of
    one trace (weka) or exactly one file of another format; what is no trace is named in the warnings. Raises
    BadTraceError for whatever cannot be used as it stands, ValueError for an unknown ``format``.
    """
    if format not in (None, *FORMATS):
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format}")
    path = Path(path)
    source = str(path)
    with _reported(source):
        if path.is_dir():
            digest = hashlib.sha256()
            trace = _many(_folder(path, digest.update), source, format)
            return _signed(trace, digest.hexdigest())
        sha256 = _sha256(path)
        with _unpacked(path) as stream:
            head = stream.read(_TAR_AT + len(_TAR))
            stream.seek(0)
            if not head:
                raise BadTraceError("a trace must have rows, got an empty file", source, "restore the file")
            if head[_TAR_AT:] == _TAR:
                with tarfile.open(path, "r|*") as archive:
                    return _signed(_many(_members(archive), source, format), sha256)
            kind = format or sniff(stream, source)
            if kind is None:
                raise _unknown(head, source)
            return _signed(_one(kind, stream, source), sha256)


def _one(kind: str, stream: BinaryIO, source: str) -> Trace:
    if kind == "weka":
        return weka.read([(source, stream.read())], source)
    return _READERS[kind](stream, source)


def _many(files: Iterator[tuple[str, BinaryIO]], source: str, format: str | None) -> Trace:
    """The trace in several files; none but those of the first one's format."""
    skipped: list[str] = []
    found = _traces(files, format, skipped)
    first = next(found, None)
    if first is None:
        raise BadTraceError(
            f"a folder or archive must hold trace files, got none in {len(skipped):,} files",
            source,
            f"name a file or a folder with one of the formats {', '.join(FORMATS)}",
        )
    if first[0] == "weka":
        trace = weka.read(_of_kind("weka", chain([first], found)), source)
    elif second := next(found, None):
        rule = f"a folder of {first[0]} traces must hold one file, got {first[1]} and {second[1]}"
        raise BadTraceError(rule, source, "name the file to load")
    else:
        trace = _one(first[0], io.BytesIO(first[2]), first[1])
    if skipped:
        trace = with_warnings(trace, f"{len(skipped):,} files are no traces, left out: {', '.join(skipped)}")
    return trace


def _traces(
    files: Iterator[tuple[str, BinaryIO]], format: str | None, skipped: list[str]
) -> Iterator[tuple[str, str, bytes]]:
    """(format, name, content) of the trace files; the names of others go to ``skipped``."""
    for name, stream in files:
        with _reported(name):
            kind = sniff(stream, name)
            data = b"" if kind is None else stream.read()
        if kind is None or format not in (None, kind):
            skipped.append(name)
        else:
            yield kind, name, data


def _of_kind(kind: str, files: Iterator[tuple[str, str, bytes]]) -> Iterator[tuple[str, bytes]]:
    for found, name, data in files:
        if found != kind:
            raise BadTraceError(f"all files must be {kind} traces, got one of {found}", name, "load it alone")
        yield name, data


def _folder(path: Path, update: Callable[[bytes], None]) -> Iterator[tuple[str, BinaryIO]]:
    """(relative name, unpacked content), sorted by name. Feeds ``update`` what ``sha256sum`` would print."""
    for file in sorted(path.rglob("*")):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            update(f"{_sha256(file)}  {name}\n".encode())
            with _unpacked(file) as stream:
                yield name, stream


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, BinaryIO]]:
    """(name, content) of an archive's files, one at a time and in its order; nothing is unpacked to disk."""
    for member in archive:
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None:
            yield member.name, io.BytesIO(content.read())


def _sha256(path: Path) -> str:
    with path.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()


def _unpacked(path: Path) -> BinaryIO:
    with path.open("rb") as raw:
        magic = raw.read(len(_XZ))
    if magic.startswith(_GZIP):
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, lzma.open(path)) if magic == _XZ else path.open("rb")


@contextmanager
def _reported(source: str) -> Iterator[None]:
    """Errors of the file system and of unpacking become BadTraceError."""
    try:
        yield
    except FileNotFoundError:
        raise BadTraceError("a trace must exist, found no such file", source, "check the path") from None
    except (EOFError, lzma.LZMAError, tarfile.TarError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTraceError(f"a packed file must be whole: {error}", source, "restore the file") from None
    except OSError as error:
        raise BadTraceError(f"a trace must be readable: {error.strerror}", source, "check the file") from None


def _unknown(head: bytes, source: str) -> BadTraceError:
    rule = f"the content must be one of the formats {', '.join(FORMATS)}, got "
    if b"\0" in head:
        return BadTraceError(rule + "a binary file", source, "name a trace file")
    first = head.splitlines()[0][:60]
    mend = "a CSV with the columns arrival_time_s,input_tokens,output_tokens is read as it is"
    return BadTraceError(f"{rule}{first.decode(errors='replace')!r}", f"{source}:1", mend)


def _signed(trace: Trace, sha256: str) -> Trace:
    return replace(trace, meta=replace(trace.meta, sha256=sha256))
