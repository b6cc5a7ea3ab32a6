"""Scenarios that Hypothesis makes up: coalesced and single steps agree, and the books balance after every step."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfold.sim.retention import parse_retention
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.sessions import Load
from tests.test_engine import MODELS, assert_same, check_laws, run_checked, scenario

POLICY = st.sampled_from(["lru", "keep", "drop", "ttl:0", "ttl:0.7", "swap", "least-waste", "oracle"])
LIMITS = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 40),
    max_num_batched_tokens=st.integers(40, 3000),
    order=st.sampled_from(["fcfs", "sessions-first"]),
    max_preemptions=st.none() | st.integers(0, 3),
    worst_case_admission=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
    max_queue=st.none() | st.integers(0, 12),
    queue_timeout_s=st.none() | st.floats(0.01, 20.0),
)
LOAD = st.builds(
    Load,
    live_sessions=st.none() | st.integers(1, 20),
    rotation=st.integers(0, 50),
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    sessions=st.booleans(),
    rate_per_s=st.floats(0.5, 60.0),
    model=st.sampled_from(list(MODELS)),
    name=st.sampled_from(["bf16", "gaac", "esc3"]),
    mib=st.integers(250, 4000),
    limits=LIMITS,
    load=LOAD,
    policy=POLICY,
    caching=st.booleans(),
    replicas=st.integers(1, 3),
    router=st.sampled_from(
        ["round-robin", "least-outstanding", "fewest-calls", "prefix-affinity", "session-sticky"]
    ),
)
def test_both_modes_agree(
    random_trace,
    monkeypatch,
    seed,
    sessions,
    rate_per_s,
    model,
    name,
    mib,
    limits,
    load,
    policy,
    caching,
    replicas,
    router,
):
    trace = random_trace(30, seed, sessions=sessions, rate_per_s=rate_per_s, longest=2500)
    setup: Scenario = scenario(
        trace,
        name,
        model,
        mib * 2**20,
        limits=limits,
        load=load,
        retention=parse_retention(policy),
        prefix_caching=caching,
        replicas=replicas,
        router=router,
    )
    fast = run_checked(monkeypatch, setup)
    assert_same(fast, run(replace(setup, stepwise=True)))
    check_laws(fast)
