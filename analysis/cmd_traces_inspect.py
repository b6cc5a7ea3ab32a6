"""`kvfold traces inspect`: what a trace holds."""

from __future__ import annotations

from kvfold.analysis.options import Json
from kvfold.analysis.summary import print_summary
from kvfold.analysis.trace_input import CharsPerToken, Columns, TraceFormat, TracePath, checked, progress


def inspect(
    file: TracePath,
    format: TraceFormat = None,
    columns: Columns = "",
    chars_per_token: CharsPerToken = None,
    json: Json = False,
) -> None:
    """Say what a trace holds: unit, block size, what was dropped and assumed, and its statistics.

    Long files of the canonical table and of Mooncake are read row by row and never held in memory.
    """
    stated = checked(format, columns, chars_per_token)
    from kvfold.traces.stream import inspect as summarise

    with progress() as report:
        summary = summarise(file, format, report, stated)
    print_summary(summary, json)
