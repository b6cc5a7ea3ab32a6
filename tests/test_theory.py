"""The engine against queueing theory, in two steps: engine = recursion call by call, recursion = closed forms."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvfold.codec.sizes import FormatSizes, load_sizes
from kvfold.sim.gpu import GpuSpec, load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import ModelSpec, load_model
from kvfold.sim.run import FS_PER_S, OUTCOMES
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.work import Work
from kvfold.traces.columns import assemble
from kvfold.traces.table import Meta
from tests.queueing import (
    DETERMINISTIC,
    HYPEREXPONENTIAL,
    LOADS,
    QUEUES,
    Queue,
    arrivals,
    compare,
    erlang_c,
    finite_queue,
    kiefer_wolfowitz,
    lindley,
    pollaczek_khinchine,
    service_steps,
    uniforms,
)

#: Mean service of the engine's calls. Runs of 100,000 calls end within 2 s of simulated time, up to which float64
#: seconds give whole femtoseconds back.
SERVICE_FS = 4 * 10**9
EXACT_S = 2.0
#: Two-sided quantile of Student's t with 19 degrees of freedom for 99 % that all of 64 intervals hold.
T_ALL = 4.699


@dataclass(frozen=True)
class FlatCost:
    """What the engine asks of a StepCost, such that every step lasts `step_fs` whatever it computes."""

    model: ModelSpec
    gpu: GpuSpec
    sizes: FormatSizes
    step_fs: int
    tp: int = 1

    def work(self, decoding, chunks):
        return Work(self.step_fs, 0, None, "modelled")


@dataclass(frozen=True)
class Case:
    """A queue for the engine; `on_grid`: arrivals in whole steps, so that many meet the end of a step."""

    queue: Queue
    rho: float
    mean_steps: int = 1000
    on_grid: bool = False
    stepwise: bool = False

    def __str__(self):
        grid = " on the grid" if self.on_grid else ""
        return f"{self.queue.name} at {self.rho}, {self.mean_steps} steps{grid}{' stepwise' * self.stepwise}"


GENERAL_FINITE = Queue("M/G/4/10", slots=4, room=10, mixture=HYPEREXPONENTIAL)
COARSE = (
    Case(Queue("M/D/3", slots=3, mixture=DETERMINISTIC), 0.9, mean_steps=10),
    Case(GENERAL_FINITE, 0.8, mean_steps=4, on_grid=True),
    Case(GENERAL_FINITE, 0.8, mean_steps=4, on_grid=True, stepwise=True),
)
CASES = (
    Case(GENERAL_FINITE, 0.9),
    Case(Queue("M/M/1"), 0.9),
    Case(Queue("M/D/1", mixture=DETERMINISTIC), 0.8),
    Case(Queue("M/G/1", mixture=HYPEREXPONENTIAL), 0.6),
    Case(Queue("M/M/1/3", room=3), 0.8),
    Case(Queue("M/M/4", slots=4), 0.3),
    Case(Queue("M/M/4", slots=4), 0.9),
    Case(Queue("M/G/3", slots=3, mixture=HYPEREXPONENTIAL), 0.8, mean_steps=10),
    Case(Queue("M/M/2/2", slots=2, room=2), 0.6, mean_steps=10),
    Case(Queue("M/D/1", mixture=DETERMINISTIC), 0.6, mean_steps=1),
    Case(Queue("M/M/1/2", room=2), 0.8, mean_steps=4, on_grid=True),
    Case(Queue("M/M/3", slots=3), 0.6, mean_steps=4, stepwise=True),
    *COARSE,
)


def load_of(case, calls):
    """(arrivals, steps of each call, femtoseconds of a step), the same ones at every call of this."""
    u = uniforms(np.random.default_rng(1), calls)
    step_fs = SERVICE_FS // case.mean_steps
    arrival_fs = arrivals(u, SERVICE_FS / (case.queue.slots * case.rho))
    if case.on_grid:
        arrival_fs -= arrival_fs % step_fs
    return arrival_fs, service_steps(u, case.queue.mixture, case.mean_steps), step_fs


def simulate(case, arrival_fs, steps, step_fs):
    """The engine's run: as many sequences as slots, prompts of one token, one output token per step."""
    model, gpu, sizes = load_model("llama-3.1-8b"), load_gpu("h100"), load_sizes()["bf16"]
    calls, queue = len(steps), case.queue
    columns = {
        "arrival_time_s": arrival_fs / FS_PER_S,
        "input_tokens": np.ones(calls, np.int64),
        "output_tokens": steps,
    }
    max_queue = queue.room - queue.slots if queue.room else None
    return run(
        Scenario(
            trace=assemble(Meta("made", "made", "", "s", rows_read=calls, rows_kept=calls), columns),
            cost=FlatCost(model, gpu, sizes, step_fs),
            budget=replace(kv_budget(model, gpu, sizes), kv_budget_bytes=2**60),
            max_context_tokens=2**60,
            limits=Limits(max_num_seqs=queue.slots, max_queue=max_queue),
            stepwise=case.stepwise,
        )
    )


def whole_fs(seconds):
    """Exact femtoseconds of the engine's times, -1 for what never happened."""
    assert np.nanmax(seconds) < EXACT_S
    return np.rint(np.nan_to_num(seconds, nan=-1 / FS_PER_S) * FS_PER_S).astype(np.int64)


def assert_engine_is_the_recursion(case, calls):
    """Every call starts, gives its first token and ends at the very femtosecond of the recursion, or is lost.

    Returns how many are lost.
    """
    arrival_fs, steps, step_fs = load_of(case, calls)
    result = simulate(case, arrival_fs, steps, step_fs)
    slots, room = case.queue.slots, case.queue.room
    if slots == 1 and not room:
        start_fs, end_fs = lindley(arrival_fs, steps * step_fs)
    else:
        start_fs, end_fs = kiefer_wolfowitz(arrival_fs, steps, step_fs, slots, room)
    lost = start_fs < 0
    assert np.array_equal(whole_fs(result.calls.arrival_s), arrival_fs)
    assert np.array_equal(whole_fs(result.calls.scheduled_s), start_fs)
    assert np.array_equal(whole_fs(result.calls.first_token_s), np.where(lost, -1, start_fs + step_fs))
    assert np.array_equal(whole_fs(result.calls.last_token_s), end_fs)
    assert np.array_equal(result.calls.outcome == OUTCOMES.index("rejected"), lost)
    assert result.reject_reasons == ({"queue_full": int(lost.sum())} if lost.any() else {})
    assert lost.any() == bool(room)
    return int(lost.sum())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_call_is_served_as_the_recursion_says(case):
    """`python -m tests.long_theory` has 100,000 calls of every case."""
    assert_engine_is_the_recursion(case, 100_000 if case == CASES[0] else 5_000)


@pytest.mark.parametrize("case", COARSE, ids=str)
def test_littles_law_to_the_femtosecond(case):
    """Sojourns, as calls have them, add up to number x time, as steps have it; the run starts and ends empty."""
    arrival_fs, steps, step_fs = load_of(case, 5_000)
    result = simulate(case, arrival_fs, steps, step_fs)
    calls, stretches = result.calls, result.stretches
    taken = calls.outcome == OUTCOMES.index("completed")
    start_fs = whole_fs(stretches.start_s)
    duration_fs = stretches.steps * stretches.first_step_fs
    running = stretches.decode_seqs + stretches.prefill_tokens  # a prompt has one token
    number_time = ((running + stretches.waiting) * duration_fs).sum()
    # who arrives between two looks at the queue is in it from then to the end of that stretch
    end_fs = np.concatenate([[0], start_fs + duration_fs])[np.searchsorted(start_fs, arrival_fs[taken])]
    number_time += np.maximum(0, end_fs - arrival_fs[taken]).sum()
    assert number_time == (whole_fs(calls.last_token_s) - arrival_fs)[taken].sum()
    assert (running * duration_fs).sum() == (steps[taken] * step_fs).sum()
    assert running.max() <= case.queue.slots
    assert round(result.busy_s * FS_PER_S) == duration_fs.sum()


def test_the_recursion_by_hand():
    """Two slots, three calls at most, steps of 10: the rules at the head of queueing.py one by one."""
    rows = [
        (5, 2, 5, 25),  # an empty system: at once, boundaries at 15, 25, ...
        (8, 1, 15, 25),  # a free slot: at the next boundary
        (15, 1, 25, 35),  # no free slot
        (16, 9, -1, -1),  # three are there
        (25, 9, -1, -1),  # still three at the instant at which two of them end
        (26, 1, 35, 45),
        (45, 1, 45, 55),  # with the end of the last one
        (60, 1, 60, 70),  # empty again: boundaries at 70, ...
        (61, 1, 70, 80),
    ]
    arrival_fs, steps, starts, ends = np.array(rows).T
    start_fs, end_fs = kiefer_wolfowitz(arrival_fs, steps, 10, 2, 3)
    assert start_fs.tolist() == starts.tolist()
    assert end_fs.tolist() == ends.tolist()


def test_one_slot_is_lindleys_queue_whatever_the_step():
    arrival_fs, steps, step_fs = load_of(Case(GENERAL_FINITE, 0.25), 100_000)
    one, other = lindley(arrival_fs, steps * step_fs), kiefer_wolfowitz(arrival_fs, steps, step_fs, 1, 0)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("rho", LOADS)
@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.name)
def test_the_recursion_gives_the_closed_forms(queue, rho):
    """A million calls; `python -m tests.long_theory` has ten and the narrow limits."""
    rng = np.random.default_rng([QUEUES.index(queue), LOADS.index(rho)])
    for check in compare(queue, rho, 1_000_000, rng):
        assert abs(check.error) <= check.half_width(T_ALL), check
        assert (
            check.half_width()
            <= {"W_q": 0.1, "loss": 0.06, "P(wait)": 0.01, "utilisation": 0.01}[check.measure]
        )


def test_services_of_few_steps_are_those_of_a_geometric_law():
    """Two steps on average: a quarter less waiting than exponential services have."""
    check = compare(Queue("M/M/1"), 0.8, 1_000_000, np.random.default_rng(1), mean_steps=2)[0]
    assert check.theory == pytest.approx(3.0)
    assert abs(check.error) <= check.half_width() <= 0.05


def test_closed_forms_agree_with_published_values_and_with_each_other():
    assert erlang_c(3, 2.4) / (3 * 0.2) == pytest.approx(1.0787, abs=5e-5)
    assert finite_queue(10, 10, 5.0)[0] == pytest.approx(0.018385, abs=5e-7)  # tables of Erlang B
    for slots in (1, 4):
        load = 0.8 * slots
        loss, waits, wait = finite_queue(slots, 1000, load)
        assert (loss, waits) == (pytest.approx(0, abs=1e-12), pytest.approx(erlang_c(slots, load)))
        assert wait == pytest.approx(erlang_c(slots, load) / (slots - load))
    assert erlang_c(1, 0.8) == pytest.approx(0.8)
    assert pollaczek_khinchine(0.8, 2.0) == pytest.approx(0.8 / (1 - 0.8))
