"""Taking rows out of a trace: chains, edges and counts of what is left, against the whole one."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.traces import canonical
from kvfold.traces.load import load
from kvfold.traces.prefix import chain_of
from kvfold.traces.select import kept_rows, orphans, taken


def whole(random_trace, seed):
    """A trace of sessions with the parents and block ids of a file."""
    trace = random_trace(300, seed, sessions=True)
    parents = np.full(300, -1)
    parents[trace.edge_child] = trace.edge_parent
    ids = trace.block_ids - trace.block_ids.min()
    return replace(
        trace, parent_request_id=parents, block_ids=ids, wait_before_s=np.where(parents < 0, np.nan, 1.0)
    )


def subset(trace, seed, share):
    return np.flatnonzero(np.random.default_rng(seed).random(len(trace)) < share)


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chains_stay_what_they_were(random_trace, seed, share):
    trace = whole(random_trace, seed)
    rows = subset(trace, seed, share)
    made = taken(trace, rows)
    seen: set[int] = set()
    for at, row in enumerate(rows.tolist()):
        chain = chain_of(trace, row)
        assert chain_of(made, at).tolist() == chain.tolist()
        assert made.shared_blocks[at] == len(seen & set(chain.tolist()))  # nothing known is brought again
        seen |= set(chain.tolist())
        if made.shared_blocks[at]:
            assert made.shared_parent[at] < at
    assert len(made.block_ids) == len(seen)


def test_another_order_brings_blocks_with_other_rows(random_trace):
    trace = whole(random_trace, 4)
    rows = np.arange(len(trace))
    first_rows = np.flatnonzero(trace.parent_request_id < 0)
    order = np.concatenate([first_rows[::-1], np.setdiff1d(rows, first_rows)])
    made = taken(trace, order)
    for at, row in enumerate(order.tolist()):
        assert chain_of(made, at).tolist() == chain_of(trace, row).tolist()
    assert sorted(made.block_ids.tolist()) == sorted(trace.block_ids.tolist())


def test_edges_between_rows_that_are_left(random_trace):
    trace = whole(random_trace, 5)
    rows = subset(trace, 5, 0.6)
    made = taken(trace, rows)
    pairs = set(zip(trace.edge_child.tolist(), trace.edge_parent.tolist(), strict=True))
    found = set(zip(rows[made.edge_child].tolist(), rows[made.edge_parent].tolist(), strict=True))
    kept = set(rows.tolist())
    assert found == {pair for pair in pairs if kept.issuperset(pair)}
    roots = set(np.setdiff1d(np.arange(len(made)), made.edge_child).tolist())
    assert set(np.flatnonzero(made.parent_request_id < 0).tolist()) == roots
    assert np.isnan(made.wait_before_s[sorted(roots)]).all()


def test_what_went_is_counted_and_said(random_trace, tmp_path):
    trace = whole(random_trace, 6)
    rows = subset(trace, 6, 0.5)
    made, text = kept_rows(trace, rows, "by_lot", "half of them")
    lost = sum(
        1
        for row in rows.tolist()
        if (mine := trace.edge_parent[trace.edge_child == row]).size and not np.isin(mine, rows).any()
    )
    assert lost == orphans(trace, rows) > 0
    assert text == (
        f"half of them: kept {len(rows)} calls, dropped {300 - len(rows)}; {lost} calls lost the call that they"
        " follow and arrive when recorded"
    )
    assert made.meta.drops == {"by_lot": 300 - len(rows)}
    assert made.meta.rows_read == 300
    assert text in made.meta.warnings
    canonical.write(made, tmp_path / "left.jsonl")
    back = load(tmp_path / "left.jsonl")
    np.testing.assert_array_equal(back.shared_blocks, made.shared_blocks)
    np.testing.assert_array_equal(back.edge_parent, made.edge_parent)
    with pytest.raises(ValueError, match="no call is left of 300"):
        kept_rows(trace, np.empty(0, np.int64), "by_lot", "none")
