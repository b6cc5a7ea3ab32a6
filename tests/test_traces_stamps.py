"""Stamps: exact to the nanosecond, the unit stated, the zone never assumed."""

import pytest

from kvfold.traces.errors import BadTraceError
from kvfold.traces.stamps import iso_ns, number_ns


@pytest.mark.parametrize(
    ("text", "ns", "zoned"),
    [
        ("1970-01-01T00:00:00Z", 0, True),
        ("1970-01-01 00:00:00", 0, False),
        ("1970-01-01T00:00:01.1234567", 1_123_456_700, False),
        ("1970-01-01T00:00:00,000000001+00:00", 1, True),
        ("1970-01-01T02:00:00+02:00", 0, True),
        ("1969-12-31T22:30:00-0130", 0, True),
        ("2026-02-25T12:00:00.000000", 1_772_020_800 * 10**9, False),
    ],
)
def test_iso_stamps(text, ns, zoned):
    assert iso_ns(text, "f:1") == (ns, zoned)


@pytest.mark.parametrize("night", ["2023-03-12", "2023-10-29", "2023-03-26"])
def test_no_daylight_rule_moves_a_stamp(night, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    assert iso_ns(f"{night}T03:30:00", "")[0] - iso_ns(f"{night}T01:30:00", "")[0] == 7200 * 10**9


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2023-02-30T00:00:00Z",
        "2023-01-01T24:00:00Z",
        "2023-01-01",
        "now",
        None,
        5,
        "2023-01-01T00:00:60Z",
    ],
)
def test_what_is_no_stamp_is_named(text):
    with pytest.raises(BadTraceError) as caught:
        iso_ns(text, "f:3")
    assert caught.value.place == "f:3"


@pytest.mark.parametrize(
    ("value", "unit", "ns"),
    [
        (5, "s", 5 * 10**9),
        ("0.0000001", "s", 100),
        (1.5, "ms", 1_500_000),
        ("1760587678577028", "us", 1_760_587_678_577_028_000),
        (1_760_587_678_577_028_123, "ns", 1_760_587_678_577_028_123),
        (" 7 ", "ns", 7),
        ("1e3", "ms", 10**9),
    ],
)
def test_numbers_are_exact_in_their_stated_unit(value, unit, ns):
    assert number_ns(value, unit, "f:1", "ts") == ns


@pytest.mark.parametrize(
    "value",
    [
        "",
        "abc",
        "nan",
        "inf",
        "1e999",
        float("nan"),
        float("inf"),
        -1,
        "-0.1",
        10**30,
        None,
        True,
        [],
        "1e30",
    ],
)
def test_what_is_no_number_is_named(value):
    with pytest.raises(BadTraceError, match="ts must be a number of ms") as caught:
        number_ns(value, "ms", "f:9", "ts")
    assert caught.value.place == "f:9"


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00", "1970-01-01T00:00:00+14:00"])
def test_a_stamp_that_64_bits_of_nanoseconds_cannot_hold_is_named(text):
    with pytest.raises(BadTraceError, match="a stamp must be from 1970 to 2262"):
        iso_ns(text, "f:1")
