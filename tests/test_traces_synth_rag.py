"""Synthetic retrieval requests against RAGPulse's lengths and reuse."""

import re

import numpy as np
import pytest

from kvfold.traces.prefix import chain_of, prefix_hit_token_share
from kvfold.traces.published import RAG, RAG_ARRIVALS
from kvfold.traces.synth_rag import rag


@pytest.mark.parametrize("seed", [1, 2])
def test_lengths_and_reuse_are_those_of_ragpulse(seed):
    """7,106 records: P50, P90, P99 of input and output; 31.5 % of the tokens hit as a prefix of chunks and 72.0 %
    as a set (counted over the file's chunks in the order instruction, passages, history, web, question)."""
    marks = (0.5, 0.9, 0.99)
    # four times the file's size: P99 of its 7,106 outputs alone scatters by 3.7 %
    many = rag(RAG, 28_000, RAG_ARRIVALS, seed)
    np.testing.assert_allclose(np.quantile(many.input_tokens, marks), (3_140, 3_959, 5_438), rtol=0.05)
    np.testing.assert_allclose(np.quantile(many.output_tokens, marks), (234, 563, 891), rtol=0.08)
    trace = rag(RAG, 7_106, RAG_ARRIVALS, seed)
    assert prefix_hit_token_share(trace) == pytest.approx(0.315, rel=0.1)
    seen = next(text for text in trace.meta.warnings if "came before" in text)
    assert float(re.match(r"[\d.]+", seen)[0]) / 100 == pytest.approx(0.72, rel=0.1)
    assert len(trace) / trace.arrival_time_s[-1] == pytest.approx(0.0118)


def test_chains_are_paths_of_chunks():
    trace = rag(RAG, 400, RAG_ARRIVALS, 3)
    fixed_blocks = RAG.fixed_tokens // 64
    chains = [chain_of(trace, row) for row in range(400)]
    assert len({tuple(chain[:fixed_blocks].tolist()) for chain in chains}) == 1
    np.testing.assert_array_equal(trace.shared_blocks + trace.new_blocks, trace.input_tokens // 64)
    # the instruction alone is shared wherever the changing part is new
    assert (trace.shared_blocks[1:] >= fixed_blocks).all()
    assert ((trace.shared_blocks[1:] == fixed_blocks).mean()) == pytest.approx(RAG.changes, abs=0.08)
