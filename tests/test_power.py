"""Energy by hand: measured watts in attention, the power limit in the rest of a step, idle power else."""

from dataclasses import replace

import pytest

from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.analysis.metrics import metrics
from kvfold.analysis.slo import PRESETS
from kvfold.sim.gpu import load_gpu
from kvfold.sim.power import Power, power_of
from kvfold.sim.run import FS_PER_S
from kvfold.sim.scenario import Scenario, run
from tests.test_engine import calls_of

H200 = deploy("llama-3.1-8b", "h200")


def scenario(trace, power, name="bf16", **changes):
    sizes = format_sizes(name)
    return Scenario(
        trace=trace,
        cost=H200.cost(sizes),
        budget=H200.budget(sizes),
        max_context_tokens=131_072,
        power=power,
        **changes,
    )


@pytest.mark.parametrize("attend_w", [None, 500.0])
def test_two_calls_by_hand(attend_w):
    """A second call comes long after the first; each has one step for its prompt and two to decode."""
    trace = calls_of((0.0, 1000, 3), (9.0, 1000, 3))
    power = Power(700.0, 80.0, {} if attend_w is None else {"bf16": attend_w})
    setup = scenario(trace, power)
    result = run(setup)
    attend_s = 0.0
    for context in (1001, 1002):
        part = setup.cost.attention(1, context)
        attend_s += 2 * (part.base_fs + part.token_fs * context) / FS_PER_S
    overhead = setup.cost.overhead
    host_s = 6 * (overhead.step_s + overhead.sequence_s) + overhead.token_s * (2 * 1000 + 4)
    span_s = float(result.calls.last_token_s[1])
    kernels_s = result.busy_s - host_s
    expected = 700 * kernels_s + 80 * (host_s + span_s - result.busy_s)
    if attend_w is not None:
        expected += (500 - 700) * attend_s
    assert result.energy_j == pytest.approx(expected, rel=1e-12)
    assert result.idle_energy_j == pytest.approx(80 * (span_s - result.busy_s), rel=1e-12)
    assert result.attention_energy_j == pytest.approx((attend_w or 0) * attend_s, rel=1e-12)
    energy = metrics(result, PRESETS["chat"])["energy"]
    assert energy["idle_share"] == result.idle_energy_j / result.energy_j
    assert energy["j_per_task"] is None


def test_energy_is_the_same_step_by_step_and_adds_up_over_replicas(random_trace):
    trace = random_trace(80, 5, sessions=True, rate_per_s=20.0)
    setup = scenario(trace, H200.power(), "fixed4", replicas=2)
    fast, slow = run(setup), run(replace(setup, stepwise=True))
    assert (fast.energy_j, fast.idle_energy_j, fast.attention_energy_j) == (
        slow.energy_j,
        slow.idle_energy_j,
        slow.attention_energy_j,
    )
    assert 0 < fast.attention_energy_j < fast.energy_j
    found = metrics(fast, PRESETS["agent"])
    assert found["energy"]["j_per_task"] == fast.energy_j / found["sessions"]["completed"]


def test_measured_watts_are_between_idle_and_a_little_above_the_limit():
    """The limit is an average that is enforced over longer than a kernel."""
    power = H200.power()
    assert {"bf16", "fixed4"} <= set(power.attend_w)
    for watts in power.attend_w.values():
        assert 2 * power.idle_w < watts < 1.1 * power.busy_w


def test_watts_are_joules_over_time(tmp_path):
    table = tmp_path / "costs.csv"
    table.write_text(
        "# a comment\nop,format,median_us,energy_mj\n"
        "attend,bf16,100,50\nattend,bf16,100,60\nattend,bf16,50,35\nattend,esc3,10,\nlinear,bf16,10,9\n"
    )
    assert power_of(load_gpu("h200"), table).attend_w == {"bf16": 600.0}


def test_a_gpu_whose_power_nobody_knows_has_no_energy():
    result = run(scenario(calls_of((0.0, 10, 3)), Power(700.0, None)))
    found = metrics(result, PRESETS["chat"])
    assert result.energy_origin == "unknown"
    assert found["energy_j_per_output_token"] is None
    assert found["energy"]["idle_share"] is None
