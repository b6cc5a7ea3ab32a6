"""Laid-out calls: order, edges, and prefix chains against the tokens that prompts really have in common."""

import numpy as np
import pytest

from kvfold.traces import canonical
from kvfold.traces.draft import Call, Prompt, laid_out
from kvfold.traces.load import load
from kvfold.traces.prefix import chain_of


def random_calls(seed, count=200):
    """Prompts as random branches of a tree; each is also kept as a path of (token range, who wrote it)."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(int(rng.integers(1, 300)))]
    for _ in range(count):
        at = prompts[int(rng.integers(max(0, len(prompts) - 20), len(prompts)))]
        prompts.append(at.then(int(rng.integers(0, 200))))
    times = rng.permutation(count + 1).tolist()
    return [Call(float(time), prompt, 5) for time, prompt in zip(times, prompts, strict=True)]


def common_tokens(one, other):
    ancestors = {}
    while one is not None:
        ancestors[id(one)] = one.tokens
        one = one.before
    while other is not None and id(other) not in ancestors:
        other = other.before
    return 0 if other is None else other.tokens


@pytest.mark.parametrize("block_tokens", [1, 64])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chains_are_equal_as_far_as_prompts_are(seed, block_tokens):
    calls = random_calls(seed)
    trace = laid_out(calls, "made", [], block_tokens)
    ordered = sorted(calls, key=lambda call: call.arrival_s)
    chains = [chain_of(trace, row) for row in range(len(trace))]
    for row, (call, chain) in enumerate(zip(ordered, chains, strict=True)):
        assert len(chain) == call.prompt.tokens // block_tokens
        longest = 0
        for earlier in range(row):
            common = common_tokens(call.prompt, ordered[earlier].prompt) // block_tokens
            same = min(len(chain), len(chains[earlier]))
            equal = int((chain[:same] == chains[earlier][:same]).argmin()) if same else 0
            equal = same if (chain[:same] == chains[earlier][:same]).all() else equal
            assert equal == common
            longest = max(longest, common)
        assert trace.shared_blocks[row] == longest


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_gives_the_same_trace_back(tmp_path, suffix):
    trace = laid_out(random_calls(4), "made", ["made for a test"])
    canonical.write(trace, tmp_path / f"made{suffix}")
    back = load(tmp_path / f"made{suffix}")
    for name in (
        "input_tokens",
        "shared_parent",
        "shared_blocks",
        "new_blocks",
        "block_ids",
        "arrival_time_s",
    ):
        np.testing.assert_array_equal(getattr(back, name), getattr(trace, name))


def test_parents_and_turns():
    first = Call(1.0, Prompt(10), 3, service_s=2.0, session=0)
    second = Call(9.0, first.prompt.then(5), 3, 2.0, session=0).follows(first, 6.0, "tool")
    alone = Call(4.0, Prompt(7), 1)
    trace = laid_out([second, alone, first], "made", [], 0)
    assert trace.session_id.tolist() == [0, -1, 0]
    assert trace.turn_index.tolist() == [0, 0, 1]
    assert trace.parent_request_id.tolist() == [-1, -1, 0]
    assert (trace.edge_parent.tolist(), trace.edge_child.tolist(), trace.edge_wait_s.tolist()) == (
        [0],
        [2],
        [6.0],
    )
    assert trace.meta.hash_scope == "none"
    assert first.end_s == 3.0
