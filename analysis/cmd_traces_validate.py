"""`kvfold traces validate`: whether every law of a trace holds."""

from __future__ import annotations

from kvfold.analysis.options import Json
from kvfold.analysis.summary import print_summary
from kvfold.analysis.trace_input import CharsPerToken, Columns, TraceFormat, TracePath, checked, progress


def validate(
    file: TracePath,
    format: TraceFormat = None,
    columns: Columns = "",
    chars_per_token: CharsPerToken = None,
    json: Json = False,
) -> None:
    """Check all laws of a trace: references, block chains, clocks, counts. Exit code 5 names the first breach."""
    stated = checked(format, columns, chars_per_token)
    from kvfold.analysis.out import print_table
    from kvfold.traces.laws import validate as check
    from kvfold.traces.load import load
    from kvfold.traces.stats import inspect

    with progress() as report:
        trace = load(file, format, report, stated)
    laws = check(trace)
    print_summary(inspect(trace) | {"laws": laws}, json)
    if not json:
        rows = [(law["rule"], f"{law['checked']:,}") for law in laws]
        print_table("Laws that hold", ("", "checked"), rows)
