"""KV held in waits: by hand, and on the WEKA archive against its published ratios."""

import numpy as np
import pytest

from kvfold.traces.columns import KIND, assemble
from kvfold.traces.occupancy import LIMITS_S, before_in_thread, occupancy
from kvfold.traces.stats import inspect
from kvfold.traces.table import Meta
from tests.archives import weka


def made(**columns):
    rows = len(columns["input_tokens"])
    return assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns)


def two_threads():
    kinds = ("none", "none", "tool", "human", "tool")
    return made(
        session_id=[0, 0, 0, 0, -1],
        agent_id=[0, 1, 0, 0, 0],
        input_tokens=[90, 50, 190, 300, 7],
        output_tokens=[10, 10, 10, -1, 1],
        wait_before_s=[np.nan, np.nan, 30.0, 100.0, 5.0],
        wait_kind=[KIND[kind] for kind in kinds],
        recorded_e2e_s=[2.0, 1.0, 3.0, np.nan, 1.0],
    )


def test_ratios_by_hand():
    trace = two_threads()
    assert before_in_thread(trace).tolist() == [-1, -1, 0, 2, -1]
    found = occupancy(trace, (20.0, float("inf")))
    service = 100 * 2 + 60 * 1 + 200 * 3 + 8 * 1
    assert found.service_token_s == service
    assert found.ratios == {
        "tool": pytest.approx((100 * 20 / service, 100 * 30 / service)),
        "human": pytest.approx((200 * 20 / service, 200 * 100 / service)),
    }
    assert (found.calls_without_service, found.waits_unknown) == (1, 0)


def test_a_longer_limit_never_holds_less(random_trace):
    trace = random_trace(300, 5, sessions=True)
    waits = np.where(before_in_thread(trace) >= 0, 1.0 + np.arange(300) % 700, np.nan)
    waits[::50] = np.nan
    columns = {
        name: getattr(trace, name) for name in ("session_id", "agent_id", "input_tokens", "output_tokens")
    }
    held = occupancy(
        made(
            **columns, wait_before_s=waits, wait_kind=np.full(300, KIND["tool"]), recorded_e2e_s=np.ones(300)
        )
    )
    assert (np.diff(held.ratios["tool"]) >= 0).all()
    assert held.waits_unknown == int((np.isnan(waits) & (before_in_thread(trace) >= 0)).sum())


def test_without_service_there_is_no_ratio():
    found = occupancy(
        made(session_id=[0, 0], input_tokens=[5, 9], wait_before_s=[np.nan, 1.0], wait_kind=[0, 1])
    )
    assert np.isnan(found.ratios["tool"]).all()
    assert found.calls_without_service == 2
    assert inspect(made(input_tokens=[5]))["kv_occupancy"] is None


def test_the_published_ratios_of_the_weka_archive(shared_data):
    """Held while a tool runs 3.4 times, in all other gaps 17, human text alone 9.1; then by retention limit."""
    trace = weka(shared_data)
    found = occupancy(trace)
    tool, human, mixed = (np.array(found.ratios[kind]) for kind in ("tool", "human", "mixed"))
    assert found.limits_s == LIMITS_S == (60, 300, 600, 3_600, float("inf"))
    np.testing.assert_allclose(tool, (1.5, 2.4, 2.8, 3.4, 3.4), atol=0.1)
    np.testing.assert_allclose(human + mixed, (0.8, 2.6, 3.9, 8.9, 17), rtol=0.03)
    np.testing.assert_allclose(human, (0.72, 2.28, 3.37, 7.27, 9.1), rtol=0.015)
    assert (found.calls_without_service, found.waits_unknown) == (4_312, 116)
    shown = inspect(trace)["kv_occupancy"]["over_service"]["tool"]
    assert shown["60_s"] == tool[0]
    assert shown["unlimited"] == tool[-1]
