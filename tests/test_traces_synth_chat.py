"""Synthetic chat: Azure's token quantiles, bursty arrivals, shared prefixes."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.traces.burst import burst
from kvfold.traces.draws import Quantiles
from kvfold.traces.prefix import prefix_hit_token_share
from kvfold.traces.published import CHAT, CHAT_ARRIVALS
from kvfold.traces.synth_chat import Requests, Size, chat


@pytest.mark.parametrize("seed", [1, 2])
def test_token_quantiles_are_those_of_azures_conversation_trace(seed):
    """Within 5 % at P50, P90 and P99.

    100,000 requests: where one input is most likely to be off, at P90, quantiles rise so steeply (from 2,309
    at 87.5 % to 4,075 at 92.5 %) that its standard error is 1.4 %; with the file's 19,366 rows it is 3.1 %.
    """
    trace = chat(CHAT, 100_000, CHAT_ARRIVALS, seed)
    marks = (0.5, 0.9, 0.99)
    np.testing.assert_allclose(np.quantile(trace.input_tokens, marks), (1_020, 2_734.5, 4_142), rtol=0.05)
    np.testing.assert_allclose(np.quantile(trace.output_tokens, marks), (129, 424, 601), rtol=0.05)


def test_the_tables_are_those_of_the_file(shared_data):
    from kvfold.traces.load import load

    real = load(shared_data / "traces/azure-llm-2023/AzureLLMInferenceTrace_conv.csv")
    for table, sample in (
        (CHAT.sizes[0].input_tokens, real.input_tokens),
        (CHAT.sizes[0].output_tokens, real.output_tokens),
    ):
        for share, value in table.knots:
            assert value == pytest.approx(np.quantile(sample, share), rel=0.001, abs=0.5)


def test_arrivals_are_bursty_as_recorded():
    """Azure: dispersion 1.4 and 20.6 in windows of 1 s and 60 s; six traces of the file's size, averaged."""
    found = []
    for seed in range(6):
        arrival_s = chat(CHAT, 19_366, CHAT_ARRIVALS, seed).arrival_time_s
        found.append((burst(arrival_s, 1.0).dispersion, burst(arrival_s, 60.0).dispersion))
    second, minute = np.mean(found, axis=0)
    assert second == pytest.approx(1.4, rel=0.1)
    # one trace has 58 such windows: 14 to 30 over seeds, standard deviation 5.2
    assert minute == pytest.approx(20.6, rel=0.25)


def test_few_clients_carry_most_of_the_load():
    tenants, counts = np.unique(chat(CHAT, 5_000, CHAT_ARRIVALS, 1).tenant, return_counts=True)
    assert len(tenants) == 20
    assert np.sort(counts)[-5:].sum() > 0.5 * counts.sum()


def test_a_system_prompt_is_in_every_longer_prompt():
    trace = chat(replace(CHAT, system_tokens=640), 500, CHAT_ARRIVALS, 1)
    long = trace.input_tokens > 640
    first = int(np.flatnonzero(long)[0])
    assert (trace.shared_blocks[long][1:] == 10).all()
    assert (trace.shared_blocks[~long] == 0).all()
    assert trace.shared_blocks[first] == 0
    assert chat(CHAT, 50, CHAT_ARRIVALS, 1).meta.hash_scope == "none"


def test_prompts_that_continue_others_hit_their_share():
    flat = Quantiles.constant
    size = Size(1.0, Quantiles(((0, 1_000), (1, 9_000))), flat(50), 0.5, flat(0.6))
    trace = chat(Requests((size,), gap_s=flat(20)), 4_000, CHAT_ARRIVALS, 2)
    assert prefix_hit_token_share(trace) == pytest.approx(0.5 * 0.6, rel=0.1)
    hit = trace.shared_blocks > 0
    assert hit.mean() == pytest.approx(0.5, abs=0.04)
