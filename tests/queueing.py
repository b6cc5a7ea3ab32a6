"""Queues by recursion and by closed form: what the engine is compared with.

A queue has `slots` that serve one call each, first come, first served. Time is integer femtoseconds. Slots work
in steps of one common length: running calls advance in lock step; a call that arrives while others run can start
at the next boundary between two steps (its own instant included); a call that arrives at an empty system starts at
once, which sets the boundaries until the system is empty again. With a step of 1 fs this is the textbook queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

import numpy as np
from numba import njit

#: Two-sided 99 % quantile of Student's t with 19 degrees of freedom.
T_99 = 2.861
PAIRS = 20
#: Mean service.
MEAN_FS = 10**9


@njit(cache=True)
def lindley(arrival_fs, service_fs):
    """Starts and ends of calls at one slot (Lindley 1952): at once, or when the one before has ended."""
    start_fs, end_fs = np.empty_like(arrival_fs), np.empty_like(arrival_fs)
    free = np.int64(0)
    for call in range(len(arrival_fs)):
        start_fs[call] = max(arrival_fs[call], free)
        free = end_fs[call] = start_fs[call] + service_fs[call]
    return start_fs, end_fs


@njit(cache=True)
def kiefer_wolfowitz(arrival_fs, steps, step_fs, slots, room):
    """Starts and ends of calls at `slots` slots (Kiefer and Wolfowitz 1955); -1 for a refused call.

    At most `room` calls are in the system, those that end at the very instant of an arrival included; 0: no bound.
    A call takes the slot that is free first and leaves it later than that, so the latest ends of all calls tell
    everything: the `slots`-th when a slot is free, the `room`-th when there is room, the last when all is empty.
    """
    start_fs, end_fs = np.full_like(arrival_fs, -1), np.full_like(arrival_fs, -1)
    latest = np.full(max(slots, room), -1, np.int64)  # ascending
    origin = np.int64(0)
    for call in range(len(arrival_fs)):
        now = arrival_fs[call]
        if room and latest[0] >= now:
            continue
        if latest[-1] < now:
            origin = now
        boundary = origin - (origin - now) // step_fs * step_fs
        start_fs[call] = max(boundary, latest[-slots])
        end_fs[call] = start_fs[call] + steps[call] * step_fs
        place = 0
        while place + 1 < len(latest) and latest[place + 1] < end_fs[call]:
            latest[place] = latest[place + 1]
            place += 1
        latest[place] = end_fs[call]
    return start_fs, end_fs


@dataclass(frozen=True)
class Queue:
    """A queue with Poisson arrivals. `mixture`: (share, mean in mean services) of exponential services, largest
    first; none: every service is as long as the mean."""

    name: str
    slots: int = 1
    room: int = 0
    mixture: tuple[tuple[float, float], ...] = ((1.0, 1.0),)


DETERMINISTIC = ()
HYPEREXPONENTIAL = ((0.2, 3.0), (0.8, 0.5))  # E[S^2] = 4 E[S]^2, twice the exponential one
QUEUES = (
    Queue("M/M/1"),
    Queue("M/M/4", slots=4),
    Queue("M/D/1", mixture=DETERMINISTIC),
    Queue("M/G/1", mixture=HYPEREXPONENTIAL),
    Queue("M/M/2/4", slots=2, room=4),
)
LOADS = (0.3, 0.6, 0.8, 0.9)


def uniforms(rng, calls):
    """[3, calls] numbers within (0, 1) and symmetric in it, so that 1 - u is as good: for gap, service, branch."""
    return (rng.integers(2**52, size=(3, calls)) + 0.5) * 2.0**-52


def arrivals(u, mean_gap_fs):
    """Instants of a Poisson process in whole femtoseconds."""
    return np.cumsum(np.rint(-np.log(u[0]) * mean_gap_fs).astype(np.int64))


def service_steps(u, mixture, mean_steps):
    """Steps of each call: geometric, which is exponential in the limit of many steps, or always the mean."""
    if not mixture:
        return np.full(u.shape[1], mean_steps, np.int64)
    shares, ratios = np.array(mixture).T
    means = ratios[np.searchsorted(np.cumsum(shares)[:-1], u[2])] * mean_steps
    return np.ceil(np.log(u[1]) / np.log1p(-1 / means)).astype(np.int64)


def erlang_c(slots, load):
    """Probability that a call waits in M/M/c at `load` busy slots (Erlang 1917)."""
    full = load**slots / factorial(slots) * slots / (slots - load)
    return full / (sum(load**n / factorial(n) for n in range(slots)) + full)


def pollaczek_khinchine(rho, second_moment):
    """Mean wait in M/G/1 in mean services; `second_moment` is E[S^2] / E[S]^2."""
    return rho * second_moment / (2 * (1 - rho))


def finite_queue(slots, room, load):
    """(lost share, share of the taken calls that wait, mean wait of the taken calls in mean services) of M/M/c/K.

    The probability of n calls is in proportion to load^n / n!, from c calls on falling by load / c each.
    """
    weights = [1.0]
    for n in range(1, room + 1):
        weights.append(weights[-1] * load / min(n, slots))
    p = np.array(weights) / sum(weights)
    taken = 1 - p[room]
    queue_length = sum((n - slots) * p[n] for n in range(slots, room + 1))
    return p[room], p[slots:room].sum() / taken, queue_length / (load * taken)


def second_moment(mixture, mean_steps):
    """E[S^2] / E[S]^2 of a mixture of geometric numbers of steps, 1 of equal services.

    A geometric number of mean m has E[n^2] = 2 m^2 - m.
    """
    return sum(share * (2 * ratio**2 - ratio / mean_steps) for share, ratio in mixture) or 1.0


def theory(queue, rho, mean_steps=MEAN_FS):
    """What the closed forms say at `rho` = arrival rate x mean service / slots; for several slots, and for bounded
    room, only where a service has very many steps."""
    if queue.room:
        loss, waits, wait = finite_queue(queue.slots, queue.room, rho * queue.slots)
        return {"W_q": wait, "P(wait)": waits, "loss": loss, "utilisation": rho * (1 - loss)}
    if queue.slots > 1:
        waits = erlang_c(queue.slots, rho * queue.slots)
        return {"W_q": waits / (queue.slots * (1 - rho)), "P(wait)": waits, "utilisation": rho}
    wait = pollaczek_khinchine(rho, second_moment(queue.mixture, mean_steps))
    return {"W_q": wait, "P(wait)": rho, "utilisation": rho}


def estimate(queue, rho, u, mean_steps=MEAN_FS):
    """The same measures from the recursion, without the first tenth of the calls; waits in mean services."""
    arrival_fs = arrivals(u, MEAN_FS / (queue.slots * rho))
    steps = service_steps(u, queue.mixture, mean_steps)
    start_fs, end_fs = kiefer_wolfowitz(arrival_fs, steps, MEAN_FS // mean_steps, queue.slots, queue.room)
    first = len(arrival_fs) // 10
    since, until = arrival_fs[first], arrival_fs[-1]
    taken = start_fs[first:] >= 0
    wait_fs = (start_fs - arrival_fs)[first:][taken]
    busy_fs = np.maximum(0, np.minimum(end_fs, until) - np.maximum(start_fs, since)).sum()
    found = {
        "W_q": wait_fs.mean() / MEAN_FS,
        "P(wait)": (wait_fs > 0).mean(),
        "utilisation": busy_fs / (queue.slots * (until - since)),
    }
    return found | {"loss": 1 - taken.mean()} if queue.room else found


@dataclass(frozen=True)
class Check:
    """One measure of one queue: the closed form, the mean over pairs, and their standard error."""

    queue: str
    rho: float
    measure: str
    theory: float
    estimate: float
    standard_error: float

    @property
    def error(self) -> float:
        """Relative, but for a probability of waiting, which is compared in points."""
        apart = self.estimate - self.theory
        return apart if self.measure == "P(wait)" else apart / self.theory

    def half_width(self, quantile: float = T_99) -> float:
        """Of the interval around the estimate, in the unit of `error`."""
        width = quantile * self.standard_error
        return width if self.measure == "P(wait)" else width / self.theory


def compare(queue, rho, calls, rng, mean_steps=MEAN_FS):
    """A Check per measure from `calls` calls in PAIRS independent pairs of antithetic runs.

    The second run of a pair has 1 - u for every u of the first: where one has short gaps and long services, the
    other has long gaps and short services, and their mean varies less than that of two independent runs.
    """
    pairs = []
    for _ in range(PAIRS):
        u = uniforms(rng, calls // (2 * PAIRS))
        one, other = (estimate(queue, rho, half, mean_steps) for half in (u, 1 - u))
        pairs.append({name: (one[name] + other[name]) / 2 for name in one})
    checks = []
    for name, expected in theory(queue, rho, mean_steps).items():
        values = np.array([pair[name] for pair in pairs])
        error = values.std(ddof=1) / np.sqrt(PAIRS)
        checks.append(Check(queue.name, rho, name, float(expected), float(values.mean()), float(error)))
    return checks
