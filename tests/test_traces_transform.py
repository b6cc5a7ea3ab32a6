"""Spreading a coarse clock keeps the order, the ticks and every other column."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.traces.columns import assemble
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.prefix import prefix_hit_token_share
from kvfold.traces.table import Meta
from kvfold.traces.transform import (
    first_of_equal_sessions,
    has_coarse_clock,
    keep_sessions,
    spread_ticks,
)


def made(arrival_s):
    rows = len(arrival_s)
    columns = {
        "arrival_time_s": arrival_s,
        "input_tokens": np.arange(1, rows + 1),
        "output_tokens": [5] * rows,
    }
    return assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns)


def test_arrivals_stay_in_their_tick_and_in_order():
    arrival_s = np.repeat(np.arange(0.0, 300.0, 3.0), 7)
    trace = made(arrival_s)
    assert has_coarse_clock(trace)
    spread, text = spread_ticks(trace, 4)
    assert "700 arrivals" in text
    assert (np.diff(spread.arrival_time_s) >= 0).all()
    assert (np.floor(spread.arrival_time_s / 3) * 3 == arrival_s).all()
    assert len(np.unique(spread.arrival_time_s)) == 700
    assert spread.input_tokens is trace.input_tokens
    offsets = (spread.arrival_time_s - arrival_s) / 3
    # uniform on [0, 1): mean 1/2, standard error 1 / sqrt(12 n)
    assert abs(offsets.mean() - 0.5) < 4 / np.sqrt(12 * 700)
    assert np.array_equal(spread_ticks(trace, 4)[0].arrival_time_s, spread.arrival_time_s)
    assert not np.array_equal(spread_ticks(trace, 5)[0].arrival_time_s, spread.arrival_time_s)


def test_a_fine_clock_is_not_coarse_and_lone_arrivals_stay():
    trace = made(np.arange(0.0, 200.0))
    assert not has_coarse_clock(trace)
    assert np.array_equal(spread_ticks(trace, 1)[0].arrival_time_s, trace.arrival_time_s)


def test_dropping_sessions_keeps_the_others_whole(random_trace):
    trace = random_trace(200, 3, sessions=True)
    local = replace(trace, meta=replace(trace.meta, hash_scope="session"))
    with pytest.raises(BadTraceError, match="hash scope global"):
        keep_sessions(trace, [0])
    own = np.unique(local.session_id)[::2].tolist()
    rows = np.flatnonzero(np.isin(local.session_id, own))
    kept, text = keep_sessions(local, own)
    assert f"{len(rows):,} calls" in text
    assert kept.meta.rows_read == kept.meta.rows_kept + sum(kept.meta.drops.values())
    assert kept.input_tokens.tolist() == local.input_tokens[rows].tolist()
    assert kept.tool_names == [local.tool_names[row] for row in rows]
    again, _ = keep_sessions(kept, own[::2])
    assert again.meta.drops["session_not_kept"] == len(local) - len(again)
    back = dict(enumerate(rows.tolist()))
    for child, parent in zip(kept.edge_child.tolist(), kept.edge_parent.tolist(), strict=True):
        pairs = zip(local.edge_child.tolist(), local.edge_parent.tolist(), strict=True)
        assert (back[child], back[parent]) in set(pairs)


def test_the_repeats_of_the_weka_archive_are_18(shared_data):
    archive = shared_data / "traces" / "weka-claude-code-traces" / "all710_original.tar.xz"
    trace = load(archive)
    own = first_of_equal_sessions(trace)
    assert len(own) == 710 - 18
    kept, _ = keep_sessions(trace, own)
    assert len(np.unique(kept.session_id)) == 692
    assert prefix_hit_token_share(kept) == pytest.approx(0.963, abs=0.002)
    # chains still lead to the same number of blocks
    whole = (trace.shared_blocks + trace.new_blocks)[np.isin(trace.session_id, own)]
    assert np.array_equal(kept.shared_blocks + kept.new_blocks, whole)
