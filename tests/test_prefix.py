"""The prefix tree against a plain set of blocks, and its laws under random use."""

import numpy as np
import pytest

from kvfold.sim.prefix import PrefixTree
from kvfold.traces.prefix import chain_of, prefix_hit_token_share

UNIT = 64  # tokens, the block size of the made-up traces


class Oracle:
    """Which blocks are resident, as a set: slow and obvious. Only for chains that are never evicted."""

    def __init__(self):
        self.blocks = set()

    def hit(self, chain, tokens):
        hit = 0
        while hit < min(len(chain), (tokens - 1) // UNIT) and chain[hit] in self.blocks:
            hit += 1
        return hit


@pytest.mark.parametrize("seed", range(5))
def test_without_eviction_it_is_a_set_of_blocks(random_trace, seed):
    trace = random_trace(300, seed, sessions=True)
    tree, oracle = PrefixTree(trace, UNIT), Oracle()
    order = np.random.default_rng(seed).permutation(len(trace)) if seed % 2 else np.arange(len(trace))
    for call in order.tolist():
        chain = chain_of(trace, call).tolist()
        tokens = int(trace.input_tokens[call])
        assert tree.lookup(call)[1] == oracle.hit(chain, tokens)
        tree.insert(call)
        oracle.blocks.update(chain[: tokens // UNIT])
        assert tree.resident_units == len(oracle.blocks)
    assert tree.live_units == 0


@pytest.mark.parametrize("seed", range(8))
def test_laws_under_random_pins_and_evictions(random_trace, seed):
    trace = random_trace(400, seed, sessions=True)
    rng = np.random.default_rng(seed)
    tree = PrefixTree(trace, UNIT)
    pins = {}
    for now, call in enumerate(rng.integers(0, len(trace), 1500).tolist()):
        if call not in pins:
            tree.insert(call)
            node, end, _ = tree.insert(call)
            tree.pin(node, end)
            pins[call] = (node, end)
        elif rng.random() < 0.9:
            tree.unpin(*pins.pop(call), now)
        free = tree.resident_units - tree.live_units
        assert 0 <= tree.live_units <= tree.resident_units
        if rng.random() < 0.5:
            dropped = int(rng.integers(0, free + 1))
            before = tree.resident_units
            tree.evict(dropped)
            assert tree.resident_units == before - dropped
        live = set()
        for pinned in pins:
            chain = chain_of(trace, pinned).tolist()
            live.update(chain[: int(trace.input_tokens[pinned]) // UNIT])
            most = (int(trace.input_tokens[pinned]) - 1) // UNIT
            assert tree.lookup(pinned)[1] == min(len(chain), most)
        assert tree.live_units == len(live)
    for call in list(pins):
        tree.unpin(*pins.pop(call), 10_000)
    assert tree.live_units == 0
    tree.evict(tree.resident_units)
    assert tree.resident_units == 0
    assert all(tree.lookup(call)[1] == 0 for call in range(len(trace)))


def test_the_least_recently_used_run_goes_first_and_from_its_end(random_trace):
    trace = random_trace(60, 3, sessions=True)
    roots = [
        call for call in range(len(trace)) if trace.parent_request_id[call] < 0 and trace.new_blocks[call] > 8
    ]
    old, young = roots[0], roots[1]
    tree = PrefixTree(trace, UNIT)
    for now, call in enumerate((old, young)):
        node, end, _ = tree.insert(call)
        tree.pin(node, end)
        tree.unpin(node, end, now)
    whole = {call: tree.lookup(call)[1] for call in (old, young)}
    tree.evict(2)
    assert tree.lookup(old)[1] >= whole[old] - 2
    assert tree.lookup(young)[1] == whole[young]
    node, end = tree.lookup(old)
    tree.pin(node, end)
    tree.unpin(node, end, 2)
    tree.evict(2)
    assert tree.lookup(old)[1] == end
    assert tree.lookup(young)[1] == whole[young] - 2
    tree.evict(tree.resident_units)
    assert tree.lookup(young)[1] == 0


def test_a_conversation_that_only_grows_is_one_run(random_trace):
    trace = random_trace(400, 12, sessions=True)
    tree = PrefixTree(trace, UNIT)
    for call in range(len(trace)):
        tree.insert(call)
    forks = sum(
        trace.shared_parent[call] >= 0
        and trace.shared_blocks[call]
        < trace.shared_blocks[trace.shared_parent[call]] + trace.new_blocks[trace.shared_parent[call]]
        for call in range(len(trace))
    )
    assert len(tree._nodes) < forks + len(np.unique(trace.session_id)) + 2 < len(trace)


def test_units_are_shared_only_where_they_are_whole(random_trace):
    trace = random_trace(200, 9, sessions=True)
    wide = PrefixTree(trace, 256)
    for call in range(len(trace)):
        shared_tokens = int(trace.shared_blocks[call]) * 64
        hit = wide.lookup(call)[1]
        assert hit * 256 <= max(0, min(shared_tokens, int(trace.input_tokens[call]) - 1))
        wide.insert(call)


def test_an_unlimited_cache_hits_what_the_trace_says(random_trace):
    trace = random_trace(400, 11, sessions=True)
    tree, hits = PrefixTree(trace, UNIT), 0
    for call in range(len(trace)):
        hits += tree.lookup(call)[1] * UNIT
        tree.insert(call)
    share = hits / int(trace.input_tokens.sum())
    # the last token of every prompt is computed, so a whole hit loses up to one block
    assert share <= prefix_hit_token_share(trace)
    assert share == pytest.approx(
        prefix_hit_token_share(trace), abs=len(trace) * UNIT / trace.input_tokens.sum()
    )
