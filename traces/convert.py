"""A trace in one format to a file in another, and what the other cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvfold.traces import stats
from kvfold.traces.batch import Batch, only
from kvfold.traces.canonical import SUFFIXES, whole_file, write, write_batches
from kvfold.traces.load import load, load_file, named_files, sha256_of
from kvfold.traces.readers import Stated
from kvfold.traces.replayable import command, replayable
from kvfold.traces.row import header_of
from kvfold.traces.stream import LONG_BYTES, NOTHING_STATED, NeedsWholeError, Rows, by_rows, summarise
from kvfold.traces.table import Trace
from kvfold.traces.unpack import Progress, TraceFile, opened, reported

TARGETS = ("canonical", "mooncake", "vllm-bench")


def convert(
    path: str,
    out: Path,
    to: str = "canonical",
    format: str | None = None,
    progress: Progress | None = None,
    stated: Stated = NOTHING_STATED,
    long_bytes: int = LONG_BYTES,
) -> dict[str, Any]:
    """Write the trace at ``path`` to ``out``, which appears whole or not at all; its summary.

    The summary is that of `stats.inspect` with ``to``, ``not_held`` (what ``out`` leaves out, by name) and
    ``replay_command``. A long file is passed through row by row on the way to the canonical table. Raises
    BadTraceError, and ValueError where ``to`` cannot hold this trace or ``out`` has another ending.
    """
    suffixes = SUFFIXES if to == "canonical" else (".jsonl",)
    if to not in TARGETS or out.suffix not in suffixes:
        rule = f"the target must be one of {', '.join(TARGETS)}, and a {to} file end in {', '.join(suffixes)}"
        raise ValueError(f"{rule}; got {out.name}")
    with reported(path):
        if named_files(path):
            return _whole(load(path, format, progress, stated), out, to)
        with opened(path, progress) as file:
            if to == "canonical" and stated == NOTHING_STATED:
                sha256 = sha256_of(file)
                try:
                    figures = _by_rows(file, path, format, out, sha256, long_bytes)
                except NeedsWholeError:
                    figures = None
                if figures is not None:
                    return figures
            return _whole(load_file(file, path, format, stated), out, to)


def _by_rows(
    file: TraceFile, source: str, format: str | None, out: Path, sha256: str, long_bytes: int
) -> dict[str, Any] | None:
    with by_rows(file, source, format, long_bytes) as rows:
        if rows is None:
            return None
        summary = summarise(rows, source, sha256)
    with by_rows(file, source, format, long_bytes) as rows:
        assert rows is not None
        header = header_of(summary.meta)
        used = summary.used | {"source_row", "arrival_time_s"}
        write_batches(_as_kept(rows, summary.first_stamp), header, used, out)
    return summary.figures | {"to": "canonical", "not_held": {}, "replay_command": ""}


def _as_kept(rows: Rows, first_stamp: int) -> Iterator[Batch]:
    """The rows that a Trace would keep, in the order of the file, with their arrivals in seconds."""
    for batch in rows.batches:
        if rows.per_s is not None:
            stamps = batch.columns.pop("stamp")
            batch.columns |= {
                "arrival_time_s": (stamps - first_stamp) / rows.per_s,
                "source_row": batch.lines,
            }
        kept = np.flatnonzero(batch.columns["input_tokens"])
        yield batch if len(kept) == len(batch) else only(batch, kept)


def _whole(trace: Trace, out: Path, to: str) -> dict[str, Any]:
    not_held: dict[str, int] = {}
    replay_command = ""
    if to == "canonical":
        write(trace, out)
    else:
        made = replayable(trace, to)
        with whole_file(out) as file:
            file.writelines(made.lines())
        not_held, replay_command = dict(made.not_held), command(made, str(out))
    return stats.inspect(trace) | {"to": to, "not_held": not_held, "replay_command": replay_command}
