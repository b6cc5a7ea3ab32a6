"""Processed traces of Vidur: CSV, seconds, one single-shot call a row, no sessions and no prefix hashes.

Source: github.com/microsoft/vidur, ``data/processed_traces``. The splitwise files are Azure's 2023 rows with
other names and times from the first row. The arXiv file has lengths only: it cannot be replayed as it is.
"""

from __future__ import annotations

from typing import BinaryIO

from kvfold.traces import column_map
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import header_of
from kvfold.traces.table import Trace

_MAP = column_map.parse(
    "arrival_time_s=arrived_at:s,input_tokens=num_prefill_tokens,output_tokens=num_decode_tokens"
)


def read(stream: BinaryIO, source: str) -> Trace:
    """The rows of one file. Raises BadTraceError, also where there is no ``arrived_at``."""
    header = header_of(stream.readline())
    stream.seek(0)
    if "arrived_at" not in header:
        rule = f"a trace needs arrival times, but the column arrived_at is not among {', '.join(header)}"
        mend = "these are lengths only: add the column (seconds) or take another file"
        raise BadTraceError(rule, f"{source}:1", mend)
    return column_map.read(stream, source, _MAP, "vidur")
