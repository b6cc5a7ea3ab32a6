"""The prefix tree against a plain set of blocks, and its laws under random use."""

import numpy as np
import pytest

from kvfold.sim.prefix import PrefixTree
from kvfold.sim.units import DRAWS, Units
from kvfold.traces.prefix import chain_of, prefix_hit_token_share

UNIT = 64  # tokens, the block size of the made-up traces
UNITS = Units(UNIT, True, 1, 1, 1)  # of one byte, so that bytes count units
DRAWN = Units(
    UNIT, True, 60, 99, 99, (0, *np.cumsum(np.random.default_rng(1).integers(20, 100, DRAWS)).tolist())
)


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
    tree, oracle = PrefixTree(trace, UNITS), Oracle()
    order = np.random.default_rng(seed).permutation(len(trace)) if seed % 2 else np.arange(len(trace))
    for call in order.tolist():
        chain = chain_of(trace, call).tolist()
        tokens = int(trace.input_tokens[call])
        assert tree.lookup(call)[1] == oracle.hit(chain, tokens)
        tree.insert(call)
        oracle.blocks.update(chain[: tokens // UNIT])
        assert tree.resident_bytes == len(oracle.blocks)
    assert tree.live_bytes == 0


@pytest.mark.parametrize("seed", range(8))
def test_laws_under_random_pins_and_evictions(random_trace, seed):
    trace = random_trace(400, seed, sessions=True)
    rng = np.random.default_rng(seed)
    tree = PrefixTree(trace, UNITS)
    pins = {}
    for now, call in enumerate(rng.integers(0, len(trace), 1500).tolist()):
        if call not in pins:
            tree.insert(call)
            node, end, _ = tree.insert(call)
            tree.pin(node, end)
            pins[call] = (node, end)
        elif rng.random() < 0.9:
            tree.unpin(*pins.pop(call), now)
        free = tree.resident_bytes - tree.live_bytes
        assert 0 <= tree.live_bytes <= tree.resident_bytes
        if rng.random() < 0.5:
            dropped = int(rng.integers(0, free + 1))
            before = tree.resident_bytes
            tree.evict(dropped)
            assert tree.resident_bytes == before - dropped
        live = set()
        for pinned in pins:
            chain = chain_of(trace, pinned).tolist()
            live.update(chain[: int(trace.input_tokens[pinned]) // UNIT])
            most = (int(trace.input_tokens[pinned]) - 1) // UNIT
            assert tree.lookup(pinned)[1] == min(len(chain), most)
        assert tree.live_bytes == len(live)
    for call in list(pins):
        tree.unpin(*pins.pop(call), 10_000)
    assert tree.live_bytes == 0
    tree.evict(tree.resident_bytes)
    assert tree.resident_bytes == 0
    assert all(tree.lookup(call)[1] == 0 for call in range(len(trace)))


def test_the_least_recently_used_run_goes_first_and_from_its_end(random_trace):
    trace = random_trace(60, 3, sessions=True)
    roots = [
        call for call in range(len(trace)) if trace.parent_request_id[call] < 0 and trace.new_blocks[call] > 8
    ]
    old, young = roots[0], roots[1]
    tree = PrefixTree(trace, UNITS)
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
    tree.evict(tree.resident_bytes)
    assert tree.lookup(young)[1] == 0


def test_a_conversation_that_only_grows_is_one_run(random_trace):
    trace = random_trace(400, 12, sessions=True)
    tree = PrefixTree(trace, UNITS)
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
    wide = PrefixTree(trace, Units(256, True, 1, 1, 1))
    for call in range(len(trace)):
        shared_tokens = int(trace.shared_blocks[call]) * 64
        hit = wide.lookup(call)[1]
        assert hit * 256 <= max(0, min(shared_tokens, int(trace.input_tokens[call]) - 1))
        wide.insert(call)


def test_an_unlimited_cache_hits_what_the_trace_says(random_trace):
    trace = random_trace(400, 11, sessions=True)
    tree, hits = PrefixTree(trace, UNITS), 0
    for call in range(len(trace)):
        hits += tree.lookup(call)[1] * UNIT
        tree.insert(call)
    share = hits / int(trace.input_tokens.sum())
    # the last token of every prompt is computed, so a whole hit loses up to one block
    assert share <= prefix_hit_token_share(trace)
    assert share == pytest.approx(
        prefix_hit_token_share(trace), abs=len(trace) * UNIT / trace.input_tokens.sum()
    )


@pytest.mark.parametrize("seed", range(4))
def test_units_of_many_sizes_go_in_the_same_order_however_they_are_asked_for(random_trace, seed):
    """Many small evictions leave what a single one leaves, and bytes are those of the units that are left."""
    trace = random_trace(200, seed, sessions=True)
    rng = np.random.default_rng(seed)
    once, often = PrefixTree(trace, DRAWN), PrefixTree(trace, DRAWN)
    for now, call in enumerate(rng.permutation(len(trace)).tolist()):
        for tree in (once, often):
            node, end, _ = tree.insert(call)
            tree.pin(node, end)
            tree.unpin(node, end, now)
    while (asked := rng.integers(1, 4000, int(rng.integers(1, 30))).tolist()) and (
        sum(asked) + 100 < once.resident_bytes
    ):
        slack = 0
        for part in asked:
            before = often.resident_bytes
            often.evict(part - slack)
            slack += before - often.resident_bytes - part
        before = once.resident_bytes
        once.evict(sum(asked))
        assert before - once.resident_bytes - sum(asked) == slack < 99
        assert [node.resident for node in once._nodes] == [node.resident for node in often._nodes]
        assert once.resident_bytes == often.resident_bytes
        assert once.resident_bytes == sum(
            DRAWN.run_bytes(node.index, node.start, node.resident) for node in once._nodes
        )


def test_what_two_prompts_have_in_common_and_what_was_ever_computed(random_trace):
    trace = random_trace(90, 6, sessions=True)
    tree = PrefixTree(trace, UNITS)
    chains = [chain_of(trace, call).tolist() for call in range(len(trace))]
    for call in range(0, len(trace), 3):
        node, end, _ = tree.insert(call)
        tree.pin(node, end)
        tree.unpin(node, end, call)
        for other in range(len(trace)):
            same = [one == two for one, two in zip(chains[call], chains[other], strict=False)]
            common = same.index(False) if False in same else len(same)
            whole = min(int(trace.input_tokens[each]) // UNIT for each in (call, other))
            assert tree.shared(other, node, end) == min(common, whole)
    tree.evict(tree.resident_bytes)
    assert tree.resident_bytes == 0
    seen = {block for call in range(0, len(trace), 3) for block in chains[call]}
    for call, chain in enumerate(chains):
        known = [block in seen for block in chain[: int(trace.input_tokens[call]) // UNIT]]
        assert tree.ever(call) == (known.index(False) if False in known else len(known))
