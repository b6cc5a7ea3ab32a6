"""Moments as whole nanoseconds, from ISO text or from numbers in a stated unit; exact, no zone is assumed."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any

from kvfold.traces.errors import BadTraceError

NS_PER_S = 10**9
#: Nanoseconds in each unit that a number may have.
UNITS = {"s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}
#: 292 years on either side of the origin: the range of 64-bit nanoseconds.
_LAST_NS = 2**63 - 1
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?"
)
_EPOCH = datetime.date(1970, 1, 1)
_MEND = "correct the row or remove it"


def iso_ns(text: Any, place: str) -> tuple[int, bool]:
    """Nanoseconds since 1970 of an ISO 8601 stamp, and whether it names its zone. Raises BadTraceError.

    A stamp without a zone is taken as it stands, so that no daylight-saving rule can move it.
    """
    match = _ISO.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise BadTraceError(f"a stamp must be YYYY-MM-DDThh:mm:ss[.f][Z], got {text!r:.60}", place, _MEND)
    date, hour, minute, second, fraction, zone = match.groups()
    try:
        days = (datetime.date.fromisoformat(date) - _EPOCH).days
    except ValueError:
        raise BadTraceError(f"a date must exist, got {date}", place, _MEND) from None
    seconds = days * 86_400 + int(hour) * 3600 + int(minute) * 60 + int(second)
    if zone not in (None, "Z"):
        sign = -1 if zone[0] == "-" else 1
        seconds -= sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    exact = seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))
    if not 0 <= exact <= _LAST_NS:
        raise BadTraceError(f"a stamp must be from 1970 to 2262, got {date}", place, _MEND)
    return exact, zone is not None


def number_ns(value: Any, unit: str, place: str, name: str) -> int:
    """Nanoseconds of a number of ``unit`` (s, ms, us, ns), which may stand in text. Raises BadTraceError."""
    exact: int | None = None
    if isinstance(value, str):
        try:
            number = Decimal(value.strip())
            exact = round(number * UNITS[unit]) if number.is_finite() and abs(number) < _LAST_NS else None
        except InvalidOperation:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        exact = value * UNITS[unit]
    elif isinstance(value, float) and isfinite(value):
        exact = round(value * UNITS[unit])
    if exact is None or not 0 <= exact <= _LAST_NS:
        rule = f"{name} must be a number of {unit} from 0 to 292 years, got {value!r:.60}"
        raise BadTraceError(rule, place, "correct the row or the unit")
    return exact
