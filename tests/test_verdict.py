"""The verdict's parts: which format wins a tie, what binds, and how coarse searches are worded."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvfold.analysis.search import Found, Outcome
from kvfold.analysis.slo import Slo
from kvfold.analysis.verdict import (
    _best_format,
    _binding_at,
    _binding_text,
    _capacity_text,
    _misses,
    _no_capacity_text,
)
from kvfold.sim.run import FS_PER_S
from tests.test_slo import make_calls

GIB = 2**30


def run(prefill_share=0.0, peak_bytes=2 * GIB):
    """One second of steps, a share of it with prompts; 10 calls, of which 2 miss TTFT, 1 TPOT and 1 both."""
    rows = [(0, 1, 2, 101, "completed")] * 6 + [(0, 9, 10, 101, "completed")] * 2
    rows += [(0, 1, 99, 101, "completed"), (0, 9, 99, 101, "completed")]
    return SimpleNamespace(
        calls=make_calls(rows),
        kv={"peak_bytes": peak_bytes, "capacity_bytes": 10 * GIB},
        busy_s=1.0,
        stretches=SimpleNamespace(
            steps=np.array([1, 1]),
            first_step_fs=np.array([prefill_share, 1 - prefill_share]) * FS_PER_S,
            prefill_tokens=np.array([100, 0]),
        ),
    )


def searched(best, failed, **changes):
    outcomes = [Outcome(best, run(), 1.0), Outcome(failed, run(**changes), 0.8)]
    return (Found(outcomes[0], failed, tuple(outcomes)),)


def asked(*names, lossy=()):
    formats = tuple(SimpleNamespace(name=name, lossless=name not in lossy) for name in names)
    slo = Slo("own", 2.0, 0.1, None)
    return SimpleNamespace(
        baseline=formats[0], formats=formats, slo=slo, unit_load=2.0, load_unit="requests/s"
    )


def answers(highest, unlimited=0.5):
    return SimpleNamespace(gate=0.99, highest=highest, unlimited=Outcome(1.0, run(), unlimited))


def plan(**speedups):
    return {
        "step": {"formats": [{"format": name, "speedup": found} for name, found in speedups.items()]},
        "fixed_concurrency": {
            "rows": [{"format": name, "metric": "goodput", "value": 1.0 + (name == "c")} for name in speedups]
        },
    }


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_a_tie_goes_to_the_shorter_step_then_to_the_goodput_whatever_the_order(order):
    found = answers({"bf16": searched(1.0, 1.03)} | dict.fromkeys(order, searched(1.2, 1.23)))
    speedups = {"a": 0.9, "b": 1.1, "c": 1.1}
    assert _best_format(asked("bf16", *order), found, plan(**speedups)) == ("c", pytest.approx(0.2))
    assert _best_format(asked("bf16", *order), found, plan(**speedups | {"a": 1.2}))[0] == "a"


def test_changes_within_what_the_search_resolves_are_a_tie_and_larger_ones_are_not():
    highest = {"bf16": searched(1.0, 1.03), "a": searched(1.2, 1.236), "b": searched(1.22, 1.25)}
    assert _best_format(asked("bf16", "a", "b"), answers(highest), plan(a=1.1, b=1.0))[0] == "a"
    highest["b"] = searched(1.3, 1.33)
    assert _best_format(asked("bf16", "a", "b"), answers(highest), plan(a=1.1, b=1.0))[0] == "b"
    assert _best_format(asked("bf16", "a", "b", lossy="b"), answers(highest), plan(a=1.1, b=1.0))[0] == "a"


@pytest.mark.parametrize(
    ("unlimited", "prefill_share", "binds"),
    [(0.995, 0.2, "memory"), (0.98, 0.2, "bandwidth"), (0.98, 0.8, "compute")],
)
def test_memory_binds_only_where_more_of_it_serves_more(unlimited, prefill_share, binds):
    """However full the pool is: cached prefixes fill every pool in time."""
    highest = {"bf16": searched(1.0, 1.03, prefill_share=prefill_share, peak_bytes=10 * GIB)}
    assert _binding_at(answers(highest, unlimited), "bf16") == binds


def test_what_binds_names_the_limits_that_are_missed():
    failed = Outcome(1.03, run(), 0.6)
    assert _misses(asked("bf16").slo, failed) == "30.0 % miss TTFT and 20.0 % miss TPOT"
    text = _binding_text(asked("bf16"), failed, "memory")
    assert "memory for cached prefixes (live KV peaks at 20 % of the pool): at 2.06 requests/s" in text
    full = Outcome(1.03, run(peak_bytes=10 * GIB), 0.6)
    assert "there is memory: at 2.06 requests/s, the first load not served" in _binding_text(
        asked("bf16"), full, "memory"
    )


def test_a_coarse_search_claims_no_equality_and_says_how_coarse_it_is():
    highest = {"bf16": searched(1.0, 2.0), "a": searched(1.0, 2.0)}
    text = _capacity_text(asked("bf16", "a"), answers(highest), "a", 0.0)
    assert "same load" not in text
    assert "by no more than the search resolves, 100 %" in text
    assert "(2 -> 2 requests/s" in text
    highest = {"bf16": searched(1.0, 1.03), "a": searched(1.25, 1.28)}
    assert "a serves 25 % more load" in _capacity_text(asked("bf16", "a"), answers(highest), "a", 0.25)


def test_where_nothing_is_served_the_lowest_load_tried_is_named():
    tried = tuple(Outcome(load, run(), attained) for load, attained in ((1.0, 0.5), (0.25, 0.9), (0.5, 0.8)))
    highest = {"bf16": (Found(None, 0.5, tried[::2]),), "a": (Found(None, 0.25, tried),)}
    for name in ("bf16", "a"):
        text = _no_capacity_text(asked(name, "a"), answers(highest), "a")
        assert "of the lowest tried, 0.5 requests/s, 90.0 % of requests meet it" in text
