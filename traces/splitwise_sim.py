"""Traces of splitwise-sim: CSV, seconds, one single-shot call a row, no sessions and no prefix hashes.

Source: github.com/Mutinifni/splitwise-sim.
"""

from __future__ import annotations

from typing import BinaryIO

from kvfold.traces import column_map
from kvfold.traces.table import Trace

_MAP = column_map.parse(
    "arrival_time_s=arrival_timestamp:s,input_tokens=prompt_size,output_tokens=token_size,source_id=request_id"
)


def read(stream: BinaryIO, source: str) -> Trace:
    """The rows of one file. Raises BadTraceError."""
    return column_map.read(stream, source, _MAP, "splitwise-sim")
