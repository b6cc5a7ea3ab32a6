"""Azure LLM inference traces of 2023 and 2024: CSV, one single-shot call a row, no sessions, no prefixes.

Source: github.com/Azure/AzurePublicDataset. The 2023 files have naive wall-clock stamps of 100 ns; those of
2024 have microseconds and an offset. Lines may end in CRLF and the last one in nothing.
"""

from __future__ import annotations

import datetime
import re
from array import array
from collections.abc import Iterable

import numpy as np

from kvfold.traces.columns import assemble, by_arrival
from kvfold.traces.decode import UTF8_BOM
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Meta, Trace

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_ROW = re.compile(
    rb"((?:19[7-9]\d|2[01]\d\d)-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?"
    rb"(Z|[+-]\d\d:\d\d)?,(\d{1,9}),(\d{1,9})"
)
_EPOCH = datetime.date(1970, 1, 1)
_SHAPE = "YYYY-MM-DD HH:MM:SS.fffffff[+00:00],ContextTokens,GeneratedTokens"


def read(lines: Iterable[bytes], source: str) -> Trace:
    """The rows of one file. Arrivals are exact to the nanosecond and count from the earliest row.

    A naive stamp is taken as it stands, so no zone or daylight-saving rule can move it. Raises BadTraceError.
    """
    # arrays of int64, not lists: the 2024 files have 16.8 million rows
    stamps_ns, inputs, outputs, numbers = array("q"), array("q"), array("q"), array("q")
    day, day_ns = b"", 0
    zones: set[bool] = set()
    digits = zero_inputs = 0
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if number == 1:
            if line.removeprefix(UTF8_BOM) != HEADER:
                raise BadTraceError(
                    f"the header must be {HEADER.decode()}, got {line[:80]!r}",
                    f"{source}:1",
                    "restore the header line",
                )
            continue
        if not line:
            continue
        match = _ROW.fullmatch(line)
        if match is None:
            raise BadTraceError(
                f"a row must be {_SHAPE}, got {line[:80]!r}",
                f"{source}:{number}",
                "correct or remove the row",
            )
        date, hour, minute, second, fraction, zone, prompt, output = match.groups()
        if date != day:
            day, day_ns = date, _day_ns(date.decode(), f"{source}:{number}")
        zones.add(zone is None)
        if len(zones) > 1:
            raise BadTraceError(
                "all stamps must have a zone or none",
                f"{source}:{number}",
                "write all rows in one zone",
            )
        digits = max(digits, len(fraction or b""))
        if prompt.strip(b"0") == b"":
            zero_inputs += 1
            continue
        seconds = int(hour) * 3600 + int(minute) * 60 + int(second) - _offset_s(zone)
        stamps_ns.append(day_ns + seconds * 10**9 + int((fraction or b"0").ljust(9, b"0")))
        inputs.append(int(prompt))
        outputs.append(int(output))
        numbers.append(number)
    if not stamps_ns:
        raise BadTraceError(
            "a trace must have rows, got none with a prompt", source, "check that the file is whole"
        )
    stamps = np.array(stamps_ns, np.int64)
    arrival_time_s = (stamps - stamps.min()) / 1e9
    order = by_arrival(arrival_time_s)
    late = int((np.diff(stamps) < 0).sum())
    meta = Meta(
        format="azure",
        source=source,
        sha256="",
        time_unit={9: "ns", 7: "100 ns", 6: "us", 3: "ms", 0: "s"}.get(digits, f"1e-{digits} s"),
        time_zone="" if True in zones else "UTC",
        rows_read=len(inputs) + zero_inputs,
        rows_kept=len(inputs),
        drops={"zero_input_tokens": zero_inputs} if zero_inputs else {},
        warnings=(f"{late:,} rows stood before an earlier one: sorted by arrival",) if late else (),
    )
    columns = {
        "source_row": np.array(numbers)[order],
        "arrival_time_s": arrival_time_s[order],
        "input_tokens": np.array(inputs)[order],
        "output_tokens": np.array(outputs)[order],
    }
    return assemble(meta, columns)


def _day_ns(date: str, place: str) -> int:
    try:
        return (datetime.date.fromisoformat(date) - _EPOCH).days * 86_400 * 10**9
    except ValueError as error:
        raise BadTraceError(
            f"a date must exist, got {date} ({error})", place, "correct or remove the row"
        ) from None


def _offset_s(zone: bytes | None) -> int:
    if zone is None or zone == b"Z":
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[4:6])
    return (-60 if zone[:1] == b"-" else 60) * minutes
