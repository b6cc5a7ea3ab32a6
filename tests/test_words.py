"""Numbers and texts for people."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.analysis.words import UNDEFINED, clean, digits, effect, exact, interval, pair, percent, quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"),
        (65.1e-6, "s", "65.1 µs"),
        (0.412, "s", "412 ms"),
        (9.999, "s", "10.0 s"),
        (7199.0, "s", "7,199 s"),
        (7200.0, "s", "2.00 h"),
        (20 * 2**30, "bytes", "20.0 GiB"),
        (1023, "bytes", "1,023 B"),
        (131_072, "bytes", "128 KiB"),
        (1.078, "ratio", "1.08x"),
        (0.013, "share", "1.3 %"),
        (0.0001, "share", "<0.1 %"),
        (1.0, "share", "100 %"),
        (0.412, "J", "0.412 J"),
        (91_200.0, "J", "91.2 kJ"),
        (3.1, "requests/s", "3.10 req/s"),
        (1802.4, "tok/s", "1,802 tok/s"),
        (12, "", "12"),
        (None, "s", UNDEFINED),
        (math.nan, "s", UNDEFINED),
        (math.inf, "s", UNDEFINED),
    ],
)
def test_quantities(value, unit, text):
    assert quantity(value, unit) == text


@given(st.floats(1e-6, 1e9))
def test_three_digits_are_within_half_a_percent(value):
    assert math.isclose(float(digits(value).replace(",", "")), value, rel_tol=0.0051)


def test_round_numbers_are_written_as_given():
    assert [exact(10.0, "s"), exact(0.1, "s"), exact(0.5, "s"), exact(2.0, "ratio")] == [
        "10 s",
        "100 ms",
        "500 ms",
        "2x",
    ]


def test_a_pair_shares_the_unit_of_the_larger():
    assert pair(0.98, 1.02, "s") == ("0.980", "1.02", "s")
    assert pair(0.5, 3e-4, "s") == ("500", "0.300", "ms")
    assert pair(None, 0.0, "s") == (UNDEFINED, "0", "s")
    assert pair(84, 113, "") == ("84", "113", "")


def test_changes_have_signs():
    assert [percent(0.0412), percent(-0.26), percent(12.5), percent(-1e-5), percent(None)] == [
        "+4.1 %",
        "-26.0 %",
        "+1,250 %",
        "0.0 %",
        UNDEFINED,
    ]
    assert interval((-0.121, 0.09)) == "[-12.1, +9.0]"
    assert interval(None) == ""


@pytest.mark.parametrize(
    ("metric", "change", "ci95", "said"),
    [
        ("TTFT, P99", -0.2, [-0.3, -0.1], "better"),
        ("TTFT, P99", 0.2, [0.1, 0.3], "worse"),
        ("TPOT, mean", -0.2, [-0.3, 0.1], "unclear"),
        ("output tokens", 0.2, [0.1, 0.3], "better"),
        ("energy per output token", 0.2, [0.1, 0.3], "worse"),
        ("per-request rate, mean", -0.2, [-0.3, -0.1], "worse"),
        ("highest load within the SLO", 0.2, [0.1, 0.3], "better"),
        ("goodput", 0.0, [0.0, 0.0], "no change"),
        ("preemptions", 0.0, None, "no change"),
        ("preemptions", -0.5, None, ""),
        ("KV held, peak", -0.2, [-0.3, -0.1], ""),
    ],
)
def test_effects_need_an_interval_on_one_side_of_0(metric, change, ci95, said):
    assert effect({"metric": metric, "change": change, "ci95": ci95}) == said


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_clean_leaves_only_what_can_be_printed_and_encoded(value):
    def texts(item):
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for key, inner in item.items():
                yield key
                yield from texts(inner)
        else:
            for inner in item:
                yield from texts(inner)

    for text in texts(clean(value)):
        text.encode("utf-8")
        assert not any(character in "\x00\x07\x1b\r\n\t\u202e\u200b" for character in text)


def test_clean_keeps_ordinary_text():
    text = "Qwen3-8B ≤ 2 s, µs, 日本語, é"
    assert clean({"a": [text, 1, None, 2.5]}) == {"a": [text, 1, None, 2.5]}
