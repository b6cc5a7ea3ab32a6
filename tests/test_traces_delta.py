"""Chains in arrays give what `Chains` gives one by one, and refuse what it refuses."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces.delta import delta_columns
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import Chains


def one_by_one(chains, scopes):
    found = Chains()
    for row, blocks in enumerate(chains):
        found.add(blocks if scopes is None else [(scopes[row], block) for block in blocks], f"f:{row}")
    return found.columns(local_ids=scopes is not None)


def in_arrays(chains, scopes):
    ids = np.array([block for blocks in chains for block in blocks], np.int64)
    lengths = np.array([len(blocks) for blocks in chains], np.int64)
    places = [f"f:{row}" for row in range(len(chains))]
    return delta_columns(ids, lengths, places, None if scopes is None else np.array(scopes, np.int64))


@st.composite
def trees(draw):
    """Chains that begin with any part of an earlier one, with small and with huge ids; some are empty."""
    scale = draw(st.sampled_from([1, 2**40]))
    chains: list[list[int]] = []
    for row in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from([[], *chains]))
        new = [(row * 10 + at) * scale for at in range(draw(st.integers(0, 4)))]
        chains.append(base[: draw(st.integers(0, len(base)))] + new)
    return chains


@settings(max_examples=300, deadline=None)
@given(chains=trees(), scoped=st.booleans())
def test_delta_form_is_that_of_chains(chains, scoped):
    scopes = [row % 2 for row in range(len(chains))] if scoped else None
    expected, found = one_by_one(chains, scopes), in_arrays(chains, scopes)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@settings(max_examples=500, deadline=None)
@given(chains=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5))
def test_what_is_no_chain_is_refused_alike(chains):
    expected, found = (outcome(made, chains) for made in (one_by_one, in_arrays))
    if isinstance(expected, str):
        assert found == expected
    else:
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def outcome(made, chains):
    try:
        return made(chains, None)
    except BadTraceError as error:
        return str(error)
