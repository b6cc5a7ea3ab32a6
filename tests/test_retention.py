"""What becomes of a waiting session's KV: exact logs worked out by hand, and the choice of least waste."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.codec.sizes import load_sizes
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.retention import Stake, choose, parse_retention, reprefill_s, waits_of
from kvfold.sim.run import FS_PER_S
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.step import step_cost
from kvfold.sim.work import Chunk
from kvfold.traces.columns import Edges, assemble
from kvfold.traces.prefix import Chains
from kvfold.traces.table import WAIT_KINDS, Meta

SIZES = load_sizes()
MODEL, GPU = load_model("llama-3.1-8b"), load_gpu("h100")
WAIT_S = 5.0


def session(*prompts, wait_s=WAIT_S, outputs=3, arrivals=None):
    """Calls of one session; each prompt is the one before and more, in blocks of 64 tokens."""
    chains, edges = Chains(), Edges()
    for call, tokens in enumerate(prompts):
        chains.add(list(range(tokens // 64)), f"row {call}")
        if call:
            edges.add(call, call - 1, wait_s, WAIT_KINDS.index("tool"))
    columns = {
        "input_tokens": list(prompts),
        "output_tokens": [outputs] * len(prompts),
        "arrival_time_s": arrivals or [0.0] * len(prompts),
        "session_id": [0] * len(prompts),
    }
    meta = Meta(
        "made",
        "made",
        "",
        "s",
        rows_read=len(prompts),
        rows_kept=len(prompts),
        block_size_tokens=64,
        hash_scope="global",
    )
    return assemble(meta, columns | chains.columns(), edges)


def scenario(trace, retention="lru", kv_budget_bytes=2**33, name="bf16", **changes):
    return Scenario(
        trace=trace,
        cost=step_cost(MODEL, GPU, SIZES[name]),
        budget=kv_budget(MODEL, GPU, SIZES[name], kv_budget_bytes=kv_budget_bytes),
        max_context_tokens=131_072,
        retention=parse_retention(retention),
        **changes,
    )


def call_fs(cost, prompt, history, outputs=3):
    """(first token, last token) after the admission of a call alone on the engine."""
    first = cost.base_fs(0, prompt - history, 1) + cost.chunk_fs(Chunk(prompt - history, history, True))
    rest = sum(cost.decode_fs(1, prompt + step, 0) for step in range(1, outputs))
    return first, first + rest


@pytest.mark.parametrize(
    ("policy", "cached", "held_s"),
    [
        ("lru", 640, 0),
        ("keep", 640, WAIT_S),
        ("drop", 0, 0),
        ("ttl:1", 640, 1),
        ("ttl:60", 640, WAIT_S),
        ("swap", 640, 0),
        ("oracle", 640, 0),
        ("least-waste", 640, 0),
    ],
)
def test_a_tool_wait_by_hand(policy, cached, held_s):
    setup = scenario(session(640, 1280), policy)
    first, last = call_fs(setup.cost, 640, 0)
    second = last + round(WAIT_S * FS_PER_S)
    token = second + call_fs(setup.cost, 1280, cached)[0]
    end = second + call_fs(setup.cost, 1280, cached)[1]
    result = run(setup)
    assert result.calls.first_token_s.tolist() == [first / FS_PER_S, token / FS_PER_S]
    assert result.calls.last_token_s.tolist() == [last / FS_PER_S, end / FS_PER_S]
    assert result.calls.cached_tokens.tolist() == [0, cached]
    prefix_bytes = 640 * MODEL.kv_bytes_per_token()
    if policy not in ("oracle", "least-waste"):
        assert result.kv["idle_held_byte_s"] == pytest.approx(held_s * prefix_bytes)
    assert result.kv["re_prefilled_tokens"] == 640 - cached
    if policy == "swap":
        assert result.kv["host_byte_s"] == pytest.approx(WAIT_S * prefix_bytes)
        assert result.kv["idle_cached_byte_s"] == 0
    if policy == "lru":
        assert result.kv["idle_cached_byte_s"] == pytest.approx(WAIT_S * prefix_bytes)


@pytest.mark.parametrize(("policy", "column"), [("keep", "idle_held_byte_s"), ("swap", "host_byte_s")])
def test_nothing_is_kept_for_a_call_that_was_refused(policy, column):
    """The second call is too long; a third one, unrelated, makes the run go on for long after it."""
    trace = session(640, 1280, 64, arrivals=[0.0, 0.0, 100.0])
    trace = replace(
        trace,
        edge_child=trace.edge_child[:1],
        edge_parent=trace.edge_parent[:1],
        edge_wait_s=trace.edge_wait_s[:1],
        edge_wait_kind=trace.edge_wait_kind[:1],
        session_id=np.array([0, 0, 1], np.int32),
    )
    setup = replace(scenario(trace, policy), max_context_tokens=1000)
    for each in (setup, replace(setup, stepwise=True)):
        result = run(each)
        assert result.reject_reasons == {"longer_than_model_context": 1}
        assert result.kv[column] == pytest.approx(WAIT_S * 640 * MODEL.kv_bytes_per_token())


def test_a_transfer_that_takes_longer_than_its_step_lengthens_it():
    slow_link = replace(GPU, host_link_bytes_per_s=1e9)
    setup = scenario(session(640, 704), "swap")
    setup = replace(setup, cost=step_cost(MODEL, slow_link, SIZES["bf16"]))
    transfer_fs = round(640 * MODEL.kv_bytes_per_token() / 1e9 * FS_PER_S)
    calls = run(setup).calls
    compute = call_fs(setup.cost, 704, 640)[0]
    assert transfer_fs > compute
    assert calls.first_token_s[1] - calls.arrival_s[1] == pytest.approx(transfer_fs / FS_PER_S, rel=1e-12)


def test_preemption_and_recomputation_by_hand():
    """Ten pages for two calls of 64 + 40 tokens: the younger is preempted at its 17th token and starts over."""
    page_bytes = 16 * MODEL.kv_bytes_per_token()
    trace = session(64, 64, wait_s=0.0, outputs=40)
    trace = replace(
        trace,
        session_id=np.array([-1, -1], np.int32),
        meta=replace(trace.meta, hash_scope="none"),
        edge_child=trace.edge_child[:0],
        edge_parent=trace.edge_parent[:0],
        edge_wait_s=trace.edge_wait_s[:0],
        edge_wait_kind=trace.edge_wait_kind[:0],
    )
    setup = scenario(trace, kv_budget_bytes=10 * page_bytes)
    cost = setup.cost
    both = cost.base_fs(0, 128, 2) + 2 * cost.chunk_fs(Chunk(64, 0, True))
    together = sum(cost.decode_fs(2, 2 * context, 0) for context in range(65, 81))
    alone = sum(cost.decode_fs(1, context, 0) for context in range(81, 104))
    again = cost.base_fs(0, 81, 1) + cost.chunk_fs(Chunk(81, 0, True))
    rest = sum(cost.decode_fs(1, context, 0) for context in range(82, 104))
    result = run(setup)
    first_end = both + together + alone
    assert result.calls.last_token_s.tolist() == [
        first_end / FS_PER_S,
        (first_end + again + rest) / FS_PER_S,
    ]
    assert result.calls.preemptions.tolist() == [0, 1]
    assert result.calls.prefilled_tokens.tolist() == [64, 64 + 81]
    assert result.gap_s.tolist() == [(alone + again) / FS_PER_S]
    swapped = run(replace(setup, limits=Limits(preemption="swap")))
    back = cost.base_fs(0, 1, 1) + cost.chunk_fs(Chunk(1, 80, True))
    moved_fs = round(5 * page_bytes / GPU.host_link_bytes_per_s * FS_PER_S)
    out_fs = max(0, moved_fs - cost.decode_fs(1, 81, 0))
    assert swapped.calls.last_token_s[1] == (first_end + out_fs + max(back, moved_fs) + rest) / FS_PER_S
    assert swapped.kv["host_byte_s"] > 0


def test_raw_fallback_takes_raw_bytes():
    """A format of which half the blocks stay raw holds the mean of slot and raw size per block."""
    sizes = replace(SIZES["gaac"], raw_block_share=0.5)
    budget = kv_budget(MODEL, GPU, sizes, kv_budget_bytes=2**33)
    setup = replace(scenario(session(640)), cost=step_cost(MODEL, GPU, sizes), budget=budget)
    per_token = MODEL.kv_bytes_per_token()
    block_bytes = 64 * per_token * (0.5 * sizes.slot_bits / 16 + 0.5)
    tail_bytes = 64 * per_token
    assert run(setup).kv["peak_bytes"] == pytest.approx(10 * block_bytes + tail_bytes, rel=1e-6)


def test_least_waste_takes_the_smallest():
    stake = Stake(own_bytes=100, others_bytes=900, reprefill_s=2.0, transfer_s=0.5, hidden_s=0.1)
    # keep 100 w, drop 1000 x 2 = 2000, swap 1000 x 0.4 = 400
    assert choose(stake, 3.9) == "keep"
    assert choose(stake, 4.1) == "swap"
    assert choose(replace(stake, transfer_s=10.0), 21.0) == "drop"


def test_expected_waits_are_the_means_of_their_kind():
    trace = session(64, 128, 192)
    trace.edge_wait_s[:] = [1.0, 5.0]
    waits = waits_of(trace)
    assert waits.actual_s == [1.0, 5.0, None]
    assert waits.expected_s == [3.0, 3.0, 0.0]


def test_time_to_compute_again_is_that_of_the_chunks():
    cost = step_cost(MODEL, GPU, SIZES["bf16"])
    expected = sum(
        cost.base_fs(0, tokens, 0) + cost.chunk_fs(Chunk(tokens, history, False))
        for tokens, history in ((2048, 0), (2048, 2048), (904, 4096))
    )
    assert reprefill_s(cost, 5000, 2048) == expected / FS_PER_S


@pytest.mark.parametrize(
    "text", ["", "keep:1", "ttl", "ttl:", "ttl:-1", "ttl:nan", "ttl:inf", "KEEP", "lru "]
)
def test_bad_policies(text):
    with pytest.raises(ConfigError, match="--retention"):
        parse_retention(text)


def test_held_kv_is_given_up_when_the_only_waiting_call_needs_it():
    """Two sessions, a pool for one of them: keep would wait for ever, so the hold goes, and is counted."""
    per_token = MODEL.kv_bytes_per_token()
    edges = Edges()
    edges.add(1, 0, 100.0, WAIT_KINDS.index("tool"))
    chains = Chains()
    for call, chain in enumerate([list(range(10)), list(range(11)), list(range(100, 110))]):
        chains.add(chain, f"row {call}")
    trace = assemble(
        Meta("made", "made", "", "s", rows_read=3, rows_kept=3, block_size_tokens=64, hash_scope="global"),
        {
            "input_tokens": [640, 704, 640],
            "output_tokens": [3, 3, 3],
            "arrival_time_s": [0.0, 0.0, 1.0],
            "session_id": [0, 0, 1],
        }
        | chains.columns(),
        edges,
    )
    result = run(scenario(trace, "keep", kv_budget_bytes=800 * per_token))
    assert result.kv["forced_releases"] == 1
    assert result.calls.scheduled_s[2] == 1.0
    assert result.calls.last_token_s[2] < result.calls.arrival_s[1]


def test_timeouts_are_counted_and_nothing_else_changes():
    rows = 20
    trace = assemble(
        Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows),
        {"input_tokens": [2000] * rows, "output_tokens": [50] * rows, "arrival_time_s": [0.0] * rows},
    )
    limits = Limits(max_num_seqs=2, queue_timeout_s=0.5)
    result = run(scenario(trace, limits=limits))
    waited = result.calls.scheduled_s - result.calls.arrival_s
    given_up = np.isnan(result.calls.scheduled_s)
    assert 0 < given_up.sum() < rows
    assert np.nanmax(waited) <= 0.5
    assert (result.calls.outcome[given_up] == 2).all()
    assert (run(scenario(trace, limits=Limits(max_num_seqs=2))).calls.outcome == 0).all()


def test_sessions_first_lets_later_calls_overtake():
    edges = Edges()
    edges.add(1, 0, 0.01, WAIT_KINDS.index("tool"))
    rows = 8
    trace = assemble(
        Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows),
        {
            "input_tokens": [1500] * rows,
            "output_tokens": [20] * rows,
            "arrival_time_s": [0.0] * rows,
            "session_id": [0, 0, *range(1, rows - 1)],
        },
        edges,
    )
    orders = {
        order: run(scenario(trace, limits=Limits(max_num_seqs=1, order=order))).calls.scheduled_s
        for order in ("fcfs", "sessions-first")
    }
    # the later call arrives while the second session runs, and is the next to go
    assert orders["fcfs"].argmax() == 1
    assert orders["sessions-first"].argsort().tolist()[:3] == [0, 2, 1]


@pytest.mark.parametrize("max_num_seqs", [2, 256])
def test_a_bounded_queue_is_bounded_also_where_the_pool_is_what_calls_wait_for(max_num_seqs):
    rows = 200
    trace = assemble(
        Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows),
        {
            "input_tokens": [2000] * rows,
            "output_tokens": [300] * rows,
            "arrival_time_s": [0.001 * row for row in range(rows)],
        },
    )
    limits = Limits(max_num_seqs=max_num_seqs, max_queue=3)
    result = run(scenario(trace, kv_budget_bytes=700 * 2**20, limits=limits))
    assert result.stretches.waiting.max() <= 3
    assert result.reject_reasons["queue_full"] > 150
