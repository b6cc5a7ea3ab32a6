"""`kvfold traces change`: a part of a trace, or the same at another rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfold.analysis.changing import changed, changing
from kvfold.analysis.options import Json
from kvfold.analysis.summary import write_trace
from kvfold.analysis.trace_input import Columns, TraceFormat, TracePath, checked, progress
from kvfold.traces.changes import Changes


@changing
def change(
    file: TracePath,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write: .jsonl, .csv or .parquet.", dir_okay=False)
    ],
    changes: Changes,
    format: TraceFormat = None,
    columns: Columns = "",
    json: Json = False,
) -> None:
    """Write a part of a trace, or the same at another rate, and say what was changed.

    In this order: turns inferred, the clock spread, the window, the filters, the sample, the cap on idle time,
    the rate.
    Nothing is dropped, cut or moved without a count, which the file keeps among its warnings.
    """
    stated = checked(format, columns)
    from kvfold.traces.load import load

    with progress() as report:
        trace = load(file, format, report, stated)
    write_trace(changed(trace, changes), out, json)
