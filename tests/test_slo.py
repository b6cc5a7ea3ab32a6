"""Service-level objectives: what counts as good, and how own limits are written."""

import numpy as np
import pytest

from kvfold.analysis.slo import PRESETS, Slo, describe, good, parse_slo
from kvfold.sim.errors import ConfigError
from kvfold.sim.run import OUTCOMES, Calls

NAN = float("nan")


def make_calls(rows):
    """Rows of (arrival_s, first_token_s, last_token_s, output_tokens, outcome)."""
    arrival, first, last, tokens, outcome = zip(*rows, strict=True)
    n = len(rows)
    zeros = np.zeros(n, np.int64)
    return Calls(
        request_id=np.arange(n),
        session_id=np.full(n, -1, np.int32),
        input_tokens=zeros + 10,
        output_tokens=np.array(tokens, np.int64),
        arrival_s=np.array(arrival, float),
        scheduled_s=np.array(arrival, float),
        first_token_s=np.array(first, float),
        last_token_s=np.array(last, float),
        cached_tokens=zeros,
        prefilled_tokens=zeros,
        preemptions=zeros,
        outcome=np.array([OUTCOMES.index(name) for name in outcome], np.int8),
        replica=zeros,
        wait_before_s=np.full(n, NAN),
        wait_kind=np.zeros(n, np.int8),
    )


def test_good_needs_completion_within_every_limit():
    calls = make_calls(
        [
            (0, 2.0, 3.0, 11, "completed"),  # both limits exactly met
            (0, 2.1, 3.0, 11, "completed"),  # TTFT
            (0, 1.0, 2.1, 11, "completed"),  # TPOT 110 ms
            (0, 1.0, 1.0, 1, "completed"),  # one token: no TPOT, passes
            (0, 2.1, 2.1, 1, "completed"),  # one token, late
            (0, 0.5, 0.6, 5, "timed_out"),
            (0, 0.5, 0.6, 5, "failed"),
            (0, NAN, NAN, 0, "rejected"),
        ]
    )
    assert good(PRESETS["chat"], calls).tolist() == [True, False, False, True, False, False, False, False]
    assert good(PRESETS["offline"], calls).tolist() == [True] * 5 + [False] * 3
    assert good(Slo("own", None, None, 2.5), calls).tolist() == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_own_limits():
    assert parse_slo("ttft=2s,tpot=100ms") == Slo("ttft=2s,tpot=100ms", 2.0, 0.1, None)
    assert parse_slo("e2e=1.5s, tpot=500us") == Slo("e2e=1.5s, tpot=500us", None, 0.0005, 1.5)
    assert describe(parse_slo("ttft=2s,tpot=100ms")) == "TTFT ≤ 2 s and TPOT ≤ 100 ms"


def test_presets_are_the_contract():
    assert {name: (slo.ttft_s, slo.tpot_s, slo.e2e_s) for name, slo in PRESETS.items()} == {
        "chat": (2.0, 0.1, None),
        "interactive": (0.5, 0.03, None),
        "agent": (10.0, 0.1, None),
        "offline": (None, None, None),
    }
    assert all(parse_slo(name) is slo for name, slo in PRESETS.items())
    assert describe(PRESETS["offline"]) == "no limits"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "one of chat, interactive, agent, offline"),
        ("", "one of chat"),
        ("Chat", "'Chat'"),
        ("ttft=2", "'ttft=2'"),
        ("ttft=2s,itl=5ms", "'itl=5ms'"),
        ("ttft=2s,", "''"),
        ("ttft=2s,ttft=3s", "ttft twice"),
        ("ttft=-2s", "positive, finite"),
        ("ttft=0s", "positive, finite"),
        ("ttft=1e999s", "positive, finite"),
        ("ttft=e.s", "positive, finite"),
        ("ttft=nans", "'ttft=nans'"),
    ],
)
def test_a_bad_slo_is_one_line_with_rule_value_and_example(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_slo(text)
    message = str(caught.value)
    assert says in message
    assert "ttft=2s,tpot=100ms" in message
    assert "\n" not in message
