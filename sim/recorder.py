"""Takes down what happens to every call and in every stretch of steps, and makes the `Run` of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import isnan, nan
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from kvfold.sim.exact import exact_dot
from kvfold.sim.power import energy_of, power_of
from kvfold.sim.run import FS_PER_S, OUTCOMES, Calls, Ints, Run, Stretches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.sim.scenario import Scenario
    from kvfold.sim.scheduler import State, Step
    from kvfold.traces.table import Trace


#: One row of Stretches: its integer columns but for the replica; then prompt tokens in the pool, live sequences,
#: and the number of the origin.
_ROW = Struct("11q")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all steps, exact: femtoseconds; those of steps with decoding, by the origin of its cost; live KV
    tokens, and live sequences, x femtoseconds."""

    busy_fs: int
    token_time: int
    sequence_time: int
    decode_fs: dict[str, int]


class Recorder:
    """Sums are kept in integer femtoseconds; times of calls in seconds, NaN where an event has not happened."""

    def __init__(self, trace: Trace, replicas: int) -> None:
        calls = len(trace)
        self._trace = trace
        self._replica = array("q", [-1]) * calls
        self._timed_out: list[int] = []
        self._arrival_s = array("d", [nan]) * calls
        self._scheduled_s = array("d", [nan]) * calls
        self._first_token_s = array("d", [nan]) * calls
        self._last_token_s = array("d", [nan]) * calls
        self._cached = array("q", [0]) * calls
        self._prefilled = array("q", [0]) * calls
        self._preemptions = array("q", [0]) * calls
        self._refusals: dict[int, str] = {}
        self._interrupted: dict[int, int] = {}  # call -> time of the last token before a preemption
        self._gaps_fs: list[int] = []
        self._prompts = 0
        self._failures: dict[int, str] = {}
        self._accounted_fs = [0] * replicas
        self.origin = ""  # where the cost of the attention of the next steps comes from
        self._origins: dict[str, int] = {}
        self._idle_byte_time = 0  # cached bytes that no live sequence pins x femtoseconds
        self._host_byte_time = 0
        self._starts_s = [array("d") for _ in range(replicas)]
        self._rows = [bytearray() for _ in range(replicas)]  # as _ROW

    def arrived(self, call: int, replica: int, now: int) -> None:
        self._arrival_s[call] = now / FS_PER_S
        self._replica[call] = replica

    def refused(self, call: int, reason: str, now: int) -> None:
        self._arrival_s[call] = now / FS_PER_S
        self._refusals[call] = reason

    def timed_out(self, call: int) -> None:
        self._timed_out.append(call)

    def failed(self, call: int, reason: str) -> None:
        """The call was given up after it had been admitted."""
        self._failures[call] = reason
        self._interrupted.pop(call, None)

    def account(self, replica: int, state: State, now: int) -> None:
        """Add up what lay idle since the last account; called before anything of it changes."""
        past_fs = now - self._accounted_fs[replica]
        self._accounted_fs[replica] = now
        tree = state.pool.tree
        if tree is not None:
            self._idle_byte_time += (tree.resident_bytes - tree.live_bytes) * past_fs
        self._host_byte_time += state.host_bytes * past_fs

    def idled(self, byte_time: int) -> None:
        """Cached bytes x femtoseconds besides what `account` sees at the end of a stretch."""
        self._idle_byte_time += byte_time

    def scheduled(self, step: Step, now: int) -> None:
        for sequence in step.preempted:
            self._preemptions[sequence.call] += 1
            if sequence.generated > 0:
                self._interrupted.setdefault(sequence.call, now)
        for sequence in step.admitted:
            if isnan(self._scheduled_s[sequence.call]):
                self._scheduled_s[sequence.call] = now / FS_PER_S
                self._cached[sequence.call] = sequence.computed
            self._prefilled[sequence.call] += sequence.prompt_tokens - sequence.computed

    def stretch(
        self, replica: int, state: State, step: Step, now: int, steps: int, first_fs: int, growth_fs: int
    ) -> int:
        """A stretch of steps begins; returns how long it takes."""
        decoding, pool = state.decoding, state.pool
        prefill_tokens = held = 0
        if step.chunks:
            for sequence, chunk in step.chunks:
                prefill_tokens += chunk.tokens
                held += sequence.prompt_tokens
        elif state.prefilling is not None:
            held = state.prefilling.prompt_tokens
        origin = self._origins.get(self.origin)
        if origin is None:
            origin = self._origins[self.origin] = len(self._origins)
        self._starts_s[replica].append(now / FS_PER_S)
        self._rows[replica] += _ROW.pack(
            steps,
            first_fs,
            growth_fs,
            decoding.count,
            prefill_tokens,
            decoding.kv_tokens,
            len(state.waiting),
            pool.live_bytes(),
            held,
            pool.sequences,
            origin,
        )
        return first_fs if steps == 1 else steps * first_fs + growth_fs * (steps * (steps - 1) // 2)

    def prompt_ended(self, call: int, now: int) -> None:
        """A prompt gives a token: the first one, or the first after a preemption."""
        self._prompts += 1
        if isnan(self._first_token_s[call]):
            self._first_token_s[call] = now / FS_PER_S
        elif call in self._interrupted:
            self._gaps_fs.append(now - self._interrupted.pop(call))

    def completed(self, call: int, now: int) -> None:
        self._last_token_s[call] = now / FS_PER_S

    def finish(
        self,
        scenario: Scenario,
        states: Sequence[State],
        unknown_waits: int,
        wait_before_s: array[float],
    ) -> Run:
        """Columns of everything taken down, with the totals and the assumptions of the run."""
        trace = self._trace
        outcome = np.full(len(trace), OUTCOMES.index("failed"), np.int8)
        last_token_s = np.array(self._last_token_s)
        outcome[~np.isnan(last_token_s)] = OUTCOMES.index("completed")
        outcome[list(self._refusals)] = OUTCOMES.index("rejected")
        outcome[self._timed_out] = OUTCOMES.index("timed_out")
        outcome[list(self._failures)] = OUTCOMES.index("failed")
        done = outcome == OUTCOMES.index("completed")
        calls = Calls(
            request_id=np.arange(len(trace), dtype=np.int64),
            session_id=trace.session_id,
            input_tokens=trace.input_tokens,
            output_tokens=np.where(done, np.maximum(trace.output_tokens, 1), 0),
            arrival_s=np.array(self._arrival_s),
            scheduled_s=np.array(self._scheduled_s),
            first_token_s=np.array(self._first_token_s),
            last_token_s=last_token_s,
            cached_tokens=np.array(self._cached, np.int64),
            prefilled_tokens=np.array(self._prefilled, np.int64),
            preemptions=np.array(self._preemptions, np.int64),
            outcome=outcome,
            replica=np.array(self._replica, np.int64),
            wait_before_s=np.array(wait_before_s),
            wait_kind=trace.wait_kind,
        )
        makespan_s = 0.0
        if done.any():
            makespan_s = float(last_token_s[done].max() - np.nanmin(calls.arrival_s))
        stretches, totals = self._table()
        energy = energy_of(
            scenario.power or power_of(scenario.cost.gpu),
            scenario.cost,
            stretches,
            self._prompts,
            totals.busy_fs,
            makespan_s * scenario.replicas,
        )
        return Run(
            calls=calls,
            stretches=stretches,
            gap_s=np.array(self._gaps_fs, np.float64) / FS_PER_S,
            reject_reasons=_counted(list(self._refusals.values())),
            fail_reasons=_counted(list(self._failures.values())),
            kv=self._kv(scenario, states, calls, stretches, totals, makespan_s),
            busy_s=totals.busy_fs / FS_PER_S,
            attention_origin_s={name: fs / FS_PER_S for name, fs in sorted(totals.decode_fs.items())},
            energy_j=energy.total_j,
            energy_origin=energy.origin,
            idle_energy_j=energy.idle_j,
            attention_energy_j=energy.attention_j,
            notes=self._notes(scenario, unknown_waits),
        )

    def _table(self) -> tuple[Stretches, Totals]:
        """Replica by replica, so that sums over steps do not depend on how stretches of replicas interleave."""
        starts_s = [np.asarray(starts) for starts in self._starts_s]
        rows = [np.frombuffer(rows, np.int64).reshape(-1, 11) for rows in self._rows]
        replica = np.repeat(np.arange(len(starts_s)), [len(starts) for starts in starts_s])
        # with one replica no second copy of the longest table of a run
        table = rows[0] if len(rows) == 1 else np.concatenate(rows)
        *columns, held, sequences, origin = table.T
        stretches = Stretches(*[np.concatenate(starts_s), *columns, replica])
        return stretches, _totals(stretches, held, sequences, origin, tuple(self._origins))

    def _kv(
        self,
        scenario: Scenario,
        states: Sequence[State],
        calls: Calls,
        stretches: Stretches,
        totals: Totals,
        makespan_s: float,
    ) -> dict[str, float]:
        budget, sizes = scenario.budget, scenario.cost.sizes
        span_fs = makespan_s * FS_PER_S
        token_bytes = budget.unit_bytes / budget.unit_tokens
        constant_bytes = budget.sequence_bytes + budget.tail_bytes
        mean_bytes = (
            (totals.token_time * token_bytes + totals.sequence_time * constant_bytes) / span_fs
            if span_fs
            else 0.0
        )
        admitted = ~np.isnan(calls.scheduled_s)
        prompt_tokens = int(calls.input_tokens[admitted].sum())
        return {
            "capacity_bytes": budget.kv_budget_bytes,
            "peak_bytes": int(stretches.used_bytes.max(initial=0)),
            "mean_bytes": mean_bytes,
            "mean_tokens": totals.token_time / span_fs if span_fs else 0.0,
            "raw_block_share": sizes.raw_block_share,
            "slot_waste_share": 1 - sizes.encoded_bits / sizes.slot_bits,
            "prefix_hit_token_share": int(calls.cached_tokens.sum()) / max(1, prompt_tokens),
            "re_prefilled_tokens": self._re_prefilled(calls),
            "idle_cached_byte_s": self._idle_byte_time / FS_PER_S,
            "idle_held_byte_s": sum(state.held_byte_time for state in states) / FS_PER_S,
            "host_byte_s": self._host_byte_time / FS_PER_S,
            "forced_releases": sum(state.forced_releases for state in states),
        }

    def _re_prefilled(self, calls: Calls) -> int:
        """Prompt tokens computed although an earlier call had computed the same prefix, and all that preemption
        made to be computed again."""
        trace = self._trace
        shared = np.minimum(trace.shared_blocks * trace.meta.block_size_tokens, trace.input_tokens - 1)
        computed_once = np.zeros(len(trace), bool)
        has_parent = trace.shared_parent >= 0
        computed_once[has_parent] = ~np.isnan(calls.first_token_s[trace.shared_parent[has_parent]])
        admitted = ~np.isnan(calls.scheduled_s)
        missed = np.maximum(0, shared - calls.cached_tokens)[computed_once & admitted].sum()
        again = np.maximum(0, calls.prefilled_tokens + calls.cached_tokens - trace.input_tokens)[
            admitted
        ].sum()
        return int(missed + again)

    def _notes(self, scenario: Scenario, unknown_waits: int) -> tuple[str, ...]:
        notes = []
        if unknown_waits:
            notes.append(f"{unknown_waits:,} waits that the trace does not know were replayed as 0 s")
        silent = int((self._trace.output_tokens == 0).sum())
        if silent:
            notes.append(f"{silent:,} calls without output were simulated with one token")
        unknown = int((self._trace.output_tokens < 0).sum())
        if unknown:
            notes.append(f"{unknown:,} calls of unknown output were simulated with one token")
        if scenario.cost.model.linear_layers and scenario.prefix_caching:
            notes.append("prefix hits assume that recurrent state can be restored at any block, at no cost")
        return tuple(notes)


def _totals(
    stretches: Stretches, held: Ints, sequences: Ints, origin: Ints, origins: tuple[str, ...]
) -> Totals:
    steps, first_fs, growth_fs = stretches.steps, stretches.first_step_fs, stretches.growth_fs
    count = stretches.decode_seqs
    pairs = steps * (steps - 1) // 2
    squares = pairs * (2 * steps - 1) // 3
    duration_fs = steps * first_fs + growth_fs * pairs
    # sum over steps j of (kv + held + count j) (first + growth j)
    token_time = exact_dot(stretches.kv_tokens + held, duration_fs)
    token_time += exact_dot(count * pairs, first_fs) + exact_dot(count * squares, growth_fs)
    by_origin = {
        name: exact_dot(duration_fs, ((origin == number) & (count > 0)).astype(np.int64))
        for number, name in enumerate(origins)
    }
    return Totals(
        busy_fs=exact_dot(duration_fs, np.ones_like(duration_fs)),
        token_time=token_time,
        sequence_time=exact_dot(sequences, duration_fs),
        decode_fs={name: fs for name, fs in by_origin.items() if fs},
    )


def _counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
