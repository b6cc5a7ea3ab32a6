"""Delta form of prefix chains: nothing is lost, sharing is as long as it can be, unsound ids are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces.columns import assemble
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import (
    Chains,
    chain_of,
    partial_last,
    prefix_hit_block_share,
    prefix_hit_token_share,
)
from kvfold.traces.table import Meta, Trace


def trace_of(chains: list[list[int]], block_tokens: int = 64) -> Trace:
    built = Chains()
    for at, chain in enumerate(chains):
        built.add(chain, f"made:{at}")
    tokens = [len(chain) * block_tokens + 1 for chain in chains]
    meta = Meta(
        "made",
        "made",
        "",
        "s",
        block_size_tokens=block_tokens,
        hash_scope="global",
        rows_read=len(chains),
        rows_kept=len(chains),
    )
    columns = built.columns() | {"input_tokens": tokens, "arrival_time_s": np.arange(len(chains))}
    return assemble(meta, columns)


@st.composite
def sound_chains(draw) -> list[list[int]]:
    """Each chain is a prefix of an earlier one and new ids."""
    chains: list[list[int]] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from([[], *chains]))
        keep = draw(st.integers(0, len(base)))
        new = draw(st.integers(0, 4))
        chains.append(base[:keep] + list(range(fresh, fresh + new)))
        fresh += new
    return chains


@settings(max_examples=200, deadline=None)
@given(sound_chains())
def test_delta_form_gives_back_every_chain(chains):
    trace = trace_of(chains)
    assert [chain_of(trace, row).tolist() for row in range(len(trace))] == chains
    assert len(trace.block_ids) == len(set(trace.block_ids.tolist()))


@settings(max_examples=200, deadline=None)
@given(sound_chains())
def test_shared_part_is_the_longest_common_prefix_with_any_earlier_call(chains):
    trace = trace_of(chains)
    for row, chain in enumerate(chains):
        longest = max((_common(chain, earlier) for earlier in chains[:row]), default=0)
        assert trace.shared_blocks[row] == longest
        assert trace.shared_parent[row] < row


def _common(a: list[int], b: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
    )


@settings(max_examples=100, deadline=None)
@given(sound_chains(), st.randoms(use_true_random=False))
def test_an_id_after_other_blocks_is_refused(chains, random):
    long = [chain for chain in chains if len(chain) >= 2]
    if not long:
        return
    bad = random.choice(long).copy()
    bad[0], bad[1] = bad[1], bad[0]
    with pytest.raises(BadTraceError, match="a block id must always follow the same blocks") as caught:
        trace_of([*chains, bad])
    assert caught.value.place == f"made:{len(chains)}"


def test_a_known_id_among_new_ones_is_refused():
    with pytest.raises(BadTraceError, match="got 2 after others than in made:0"):
        trace_of([[1, 2], [1, 5, 6, 2]])


def test_an_id_twice_in_one_chain_is_refused():
    with pytest.raises(BadTraceError, match="got 7 twice"):
        trace_of([[7, 8, 7]])


def test_a_scope_forgets_and_local_ids_never_meet():
    chains = Chains()
    chains.add([1, 2], "a")
    chains.forget()
    chains.add([2, 1], "b")
    columns = chains.columns(local_ids=True)
    assert columns["shared_blocks"] == [0, 0]
    assert columns["block_ids"].tolist() == [0, 1, 2, 3]


def test_hit_shares_by_hand():
    # blocks of 4 tokens: 9 tokens (2 blocks), 9 tokens (both shared), 13 tokens (1 shared of 3)
    trace = trace_of([[1, 2], [1, 2], [1, 3, 4]], block_tokens=4)
    assert prefix_hit_block_share(trace) == 3 / 7
    assert prefix_hit_token_share(trace) == (0 + 8 + 4) / (9 + 9 + 13)


def test_a_shared_partial_block_counts_with_its_tokens_only():
    columns = {
        "input_tokens": [5, 5],
        "shared_parent": [-1, 0],
        "shared_blocks": [0, 2],
        "new_blocks": [2, 0],
    }
    meta = Meta("made", "made", "", "s", block_size_tokens=4, hash_scope="global", rows_read=2, rows_kept=2)
    assert prefix_hit_token_share(assemble(meta, columns | {"block_ids": [1, 2]})) == 0.5


@pytest.mark.parametrize(
    ("tokens", "blocks", "expected"),
    [
        ([128, 129], [2, 3], "kept"),
        ([128, 129], [2, 2], "dropped"),
        ([129, 130], [2, 3], "mixed"),
        ([128, 64], [2, 1], "none"),
    ],
)
def test_partial_last(tokens, blocks, expected):
    columns = {"shared_blocks": [0, 0], "new_blocks": np.array(blocks)}
    assert partial_last(columns, np.array(tokens), 64, ["a:1", "a:2"]) == expected


@pytest.mark.parametrize(("tokens", "blocks"), [(128, 3), (128, 1), (129, 4), (129, 1)])
def test_a_number_of_ids_that_fits_no_rule_names_the_row(tokens, blocks):
    columns = {"shared_blocks": [0, 0], "new_blocks": np.array([1, blocks])}
    with pytest.raises(
        BadTraceError, match=rf"{tokens} tokens in blocks of 64 must have .* got {blocks}"
    ) as caught:
        partial_last(columns, np.array([64, tokens]), 64, ["a:1", "a:2"])
    assert caught.value.place == "a:2"
