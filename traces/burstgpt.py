"""BurstGPT traces, releases 1 to 3: CSV, seconds, one call a row, no prefix hashes.

Source: github.com/HPMLL/BurstGPT. Release 3 inserts two columns, ``Session ID`` (only on rows of ``Log Type``
"Conversation log") and ``Elapsed time`` (seconds from submission to the last token). Zero response tokens mark
a failed request: what it would have produced is unknown, so it is dropped by that name.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import nan

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import Seconds, Tokens, convert_row
from kvfold.traces.sheet import csv_rows
from kvfold.traces.table import Trace


class _Row(msgspec.Struct, kw_only=True, gc=False):
    timestamp: Seconds = msgspec.field(name="Timestamp")  # from midnight of the first day
    model: str = msgspec.field(name="Model", default="")
    prompt: Tokens = msgspec.field(name="Request tokens")
    output: Tokens = msgspec.field(name="Response tokens")
    log_type: str = msgspec.field(name="Log Type", default="")
    session: str | None = msgspec.field(name="Session ID", default=None)
    elapsed_s: Seconds = msgspec.field(name="Elapsed time", default=nan)


def read(lines: Iterable[bytes], source: str) -> Trace:
    """The rows of one file. ``tenant`` holds the log type. Raises BadTraceError.

    Calls of a session follow each other; the wait between them is a person's, from end to start.
    """
    calls = Calls(source)
    for number, cells in calls.reading(csv_rows(lines, source)):
        row = convert_row(cells, _Row, f"{source}:{number}")
        if not row.output:
            calls.drop("failed")
        elif not row.prompt:
            calls.drop("zero_input_tokens")
        else:
            calls.add(
                f"{source}:{number}",
                number,
                row.timestamp,
                row.prompt,
                row.output,
                session=row.session,
                e2e_s=row.elapsed_s,
                status="ok",
                model=row.model,
                tenant=row.log_type,
            )
    calls.follow_sessions("human")
    return calls.trace("burstgpt", "s")
