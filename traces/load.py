"""One way in: a file, a folder or an archive of any known format to a Trace."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from kvfold.traces.columns import with_warnings
from kvfold.traces.errors import BadTraceError
from kvfold.traces.readers import FORMATS, SEVERAL, Stated, read_one, read_several
from kvfold.traces.sniff import sniff
from kvfold.traces.table import Trace
from kvfold.traces.unpack import (
    LARGEST_DOCUMENT_BYTES,
    Progress,
    TraceFile,
    TraceStream,
    opened,
    reported,
    unpacked,
)

#: Offset and text of the magic of a tar archive (POSIX.1-1988, ustar).
_TAR_AT, _TAR = 257, b"ustar"
_ZIP = b"PK\x03\x04"
_HEAD_BYTES = 1024
_NOTHING_STATED = Stated()


def load(
    path: str | Path,
    format: str | None = None,
    progress: Progress | None = None,
    stated: Stated = _NOTHING_STATED,
) -> Trace:
    """Read the trace at ``path``: a file, a folder, a pattern of file names, a tar archive, or ``-`` for stdin.

    Each may be plain, gzip, xz or zstd. ``format`` is one of FORMATS; None finds it from the content. A folder,
    pattern or archive holds the sessions of one trace (SEVERAL) or exactly one file of another format; what is no
    trace is named in the warnings. ``progress`` is told how far a file was read. Raises BadTraceError for
    whatever cannot be used as it stands, ValueError for an unknown ``format``.
    """
    if format not in (None, *FORMATS):
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format}")
    format = format or stated.format
    source = str(path)
    with reported(source):
        if files := named_files(source):
            digest = hashlib.sha256()
            return _signed(_many(_files(files, digest.update), source, format, stated), digest.hexdigest())
        with opened(source, progress) as file:
            return load_file(file, source, format, stated)


def load_file(file: TraceFile, source: str, format: str | None, stated: Stated = _NOTHING_STATED) -> Trace:
    """The trace in an open file or archive, as `load` reads it."""
    sha256 = sha256_of(file)
    with unpacked(file, source) as stream:
        if is_tar(stream):
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                return _signed(_many(_members(archive), source, format, stated), sha256)
        kind = format or stated.format or kind_of(stream, source)
        return _signed(read_one(kind, stream, source, stated), sha256)


def named_files(path: str) -> list[tuple[str, Path]]:
    """(name, path) of the files that a folder or a pattern stands for, by name; none for a single file."""
    folder = Path(path)
    if folder.is_dir():
        found = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [(file.relative_to(folder).as_posix(), file) for file in found]
    elif folder.exists() or not glob.has_magic(path):
        return []
    else:
        found = sorted(file for file in map(Path, glob.glob(path, recursive=True)) if file.is_file())
        names = [(file.as_posix(), file) for file in found]
    if not names:
        rule = "a folder or pattern must hold trace files, got none in 0 files"
        raise BadTraceError(rule, path, "check the name")
    return names


def is_tar(stream: TraceStream) -> bool:
    """Whether a tar archive begins here; the stream is back at its start."""
    head = stream.read(_TAR_AT + len(_TAR))
    stream.seek(0)
    return head[_TAR_AT:] == _TAR


def kind_of(stream: TraceStream, source: str) -> str:
    """The format of one file, from its content. Raises BadTraceError where it has none of ours."""
    kind = sniff(stream, source)
    if kind is None:
        raise _unknown(stream.read(_HEAD_BYTES), source)
    return kind


def sha256_of(file: TraceFile) -> str:
    """What ``sha256sum`` prints for an open file, which is then back at its start."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := os.read(file.fileno(), 1 << 20):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def _many(files: Iterator[tuple[str, TraceStream]], source: str, format: str | None, stated: Stated) -> Trace:
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
    if first[0] in SEVERAL:
        trace = read_several(first[0], _of_kind(first[0], chain([first], found)), source, stated)
    elif second := next(found, None):
        rule = f"a folder of {first[0]} traces must hold one file, got {first[1]} and {second[1]}"
        raise BadTraceError(rule, source, "name the file to load")
    else:
        trace = read_one(first[0], io.BytesIO(first[2]), first[1], stated)
    if skipped:
        trace = with_warnings(trace, f"{len(skipped):,} files are no traces, left out: {', '.join(skipped)}")
    return trace


def _traces(
    files: Iterator[tuple[str, TraceStream]], format: str | None, skipped: list[str]
) -> Iterator[tuple[str, str, bytes]]:
    """(format, name, content) of the trace files; the names of others go to ``skipped``."""
    for name, stream in files:
        with reported(name):
            kind = sniff(stream, name, format)
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


def _files(
    files: Sequence[tuple[str, Path]], update: Callable[[bytes], None]
) -> Iterator[tuple[str, TraceStream]]:
    """(name, content) of files on disk. Feeds ``update`` what ``sha256sum`` would print."""
    for name, path in files:
        with opened(str(path)) as file:
            update(f"{sha256_of(file)}  {name}\n".encode())
            with unpacked(file, name) as stream:
                yield name, stream


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, TraceStream]]:
    """(name, content) of an archive's files, one at a time and in its order; nothing is unpacked to disk."""
    for member in archive:
        content = archive.extractfile(member) if member.isfile() else None
        if content is not None:
            if member.size > LARGEST_DOCUMENT_BYTES:
                rule = f"a file in an archive must have at most {LARGEST_DOCUMENT_BYTES:,} bytes"
                raise BadTraceError(
                    f"{rule}, got {member.size:,}", member.name, "unpack it and name the file"
                )
            yield member.name, unpacked(io.BytesIO(content.read()), member.name)


def _unknown(head: bytes, source: str) -> BadTraceError:
    rule = f"the content must be one of the formats {', '.join(FORMATS)}, got "
    if not head:
        return BadTraceError("a trace must have rows, got an empty file", source, "restore the file")
    if head.startswith(_ZIP):
        return BadTraceError(rule + "a zip archive", source, "unpack it, or pack the files as .tar.gz")
    if b"\0" in head:
        return BadTraceError(rule + "a binary file", source, "name a trace file")
    first = head.splitlines()[0][:60]
    mend = "a CSV with the columns arrival_time_s,input_tokens,output_tokens is read as it is, others by --columns"
    return BadTraceError(f"{rule}{first.decode(errors='replace')!r}", f"{source}:1", mend)


def _signed(trace: Trace, sha256: str) -> Trace:
    return replace(trace, meta=replace(trace.meta, sha256=sha256))
