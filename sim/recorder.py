"""Takes down what happens to every call and in every stretch of steps, and makes the `Run` of it."""

from __future__ import annotations

from array import array
from math import isnan, nan
from typing import TYPE_CHECKING

import numpy as np

from kvfold.sim.run import FS_PER_S, OUTCOMES, Calls, Run, Stretches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.sim.scenario import Scenario
    from kvfold.sim.scheduler import State, Step
    from kvfold.traces.table import Trace


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
        self._busy_fs = 0
        self._token_time = 0  # live KV tokens x femtoseconds
        self._sequence_time = 0
        self._peak_bytes = [0] * replicas
        self._accounted_fs = [0] * replicas
        self._origin = ""
        self._origin_fs: dict[str, int] = {}
        self._idle_unit_time = 0  # cached units that no live sequence pins x femtoseconds
        self._host_unit_time = 0
        self._starts_s = array("d")
        self._rows = array("q")  # the integer columns of Stretches, row by row

    def arrived(self, call: int, replica: int, now: int) -> None:
        self._arrival_s[call] = now / FS_PER_S
        self._replica[call] = replica

    def refused(self, call: int, reason: str, now: int) -> None:
        self._arrival_s[call] = now / FS_PER_S
        self._refusals[call] = reason

    def timed_out(self, call: int) -> None:
        self._timed_out.append(call)

    def account(self, replica: int, state: State, now: int) -> None:
        """Add up what lay idle since the last account; called before anything of it changes."""
        past_fs = now - self._accounted_fs[replica]
        self._accounted_fs[replica] = now
        tree = state.pool.tree
        if tree is not None:
            self._idle_unit_time += (tree.resident_units - tree.live_units) * past_fs
        self._host_unit_time += state.host_units * past_fs

    def idled(self, unit_time: int) -> None:
        """Cached units x femtoseconds besides what `account` sees at the end of a stretch."""
        self._idle_unit_time += unit_time

    def attended(self, origin: str) -> None:
        """Where the cost of the attention of the next steps comes from."""
        self._origin = origin

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
    ) -> None:
        decoding = state.decoding
        prefill_tokens = held = 0
        for sequence, chunk in step.chunks:
            prefill_tokens += chunk.tokens
            held += sequence.prompt_tokens
        if state.prefilling is not None and not step.chunks:
            held += state.prefilling.prompt_tokens
        pairs = steps * (steps - 1) // 2
        duration_fs = steps * first_fs + growth_fs * pairs
        squares = (steps - 1) * steps * (2 * steps - 1) // 6
        self._busy_fs += duration_fs
        if decoding.count:
            self._origin_fs[self._origin] = self._origin_fs.get(self._origin, 0) + duration_fs
        # sum over steps j of (kv + held + count j) (first + growth j)
        self._token_time += (decoding.kv_tokens + held) * duration_fs
        self._token_time += decoding.count * (first_fs * pairs + growth_fs * squares)
        self._sequence_time += state.pool.sequences * duration_fs
        used_bytes = state.pool.live_bytes()
        self._peak_bytes[replica] = max(self._peak_bytes[replica], used_bytes)
        self._starts_s.append(now / FS_PER_S)
        self._rows.extend(
            (
                steps,
                first_fs,
                growth_fs,
                decoding.count,
                prefill_tokens,
                decoding.kv_tokens,
                len(state.waiting),
                used_bytes,
                replica,
            )
        )

    def prompt_ended(self, call: int, now: int) -> None:
        """A prompt gives a token: the first one, or the first after a preemption."""
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
        busy_s = self._busy_fs / FS_PER_S
        gpu = scenario.cost.gpu
        idle_energy_j, energy_j, energy_origin = float("nan"), float("nan"), "unknown"
        if gpu.power_limit_w is not None and gpu.idle_w is not None:
            rest_s = max(0.0, makespan_s * scenario.replicas - busy_s)
            idle_energy_j = gpu.idle_w * scenario.cost.tp * rest_s
            energy_j = gpu.power_limit_w * scenario.cost.tp * busy_s + idle_energy_j
            energy_origin = "modelled"
        return Run(
            calls=calls,
            stretches=self._stretches(),
            gap_s=np.array(self._gaps_fs, np.float64) / FS_PER_S,
            reject_reasons=_counted(list(self._refusals.values())),
            kv=self._kv(scenario, states, calls, makespan_s),
            busy_s=busy_s,
            attention_origin_s={name: fs / FS_PER_S for name, fs in sorted(self._origin_fs.items())},
            energy_j=energy_j,
            energy_origin=energy_origin,
            idle_energy_j=idle_energy_j,
            notes=self._notes(scenario, unknown_waits),
        )

    def _stretches(self) -> Stretches:
        rows = (
            np.frombuffer(self._rows, np.int64).reshape(-1, 9) if self._rows else np.empty((0, 9), np.int64)
        )
        starts_s = np.array(self._starts_s, np.float64)
        if rows[:, -1].any():
            # replica by replica, so that sums over steps do not depend on how stretches of replicas interleave
            order = np.argsort(rows[:, -1], kind="stable")
            starts_s, rows = starts_s[order], rows[order]
        return Stretches(starts_s, *rows.T)

    def _kv(
        self, scenario: Scenario, states: Sequence[State], calls: Calls, makespan_s: float
    ) -> dict[str, float]:
        budget, sizes = scenario.budget, scenario.cost.sizes
        span_fs = makespan_s * FS_PER_S
        token_bytes = budget.unit_bytes / budget.unit_tokens
        constant_bytes = budget.sequence_bytes + budget.tail_bytes
        mean_bytes = (
            (self._token_time * token_bytes + self._sequence_time * constant_bytes) / span_fs
            if span_fs
            else 0.0
        )
        admitted = ~np.isnan(calls.scheduled_s)
        prompt_tokens = int(calls.input_tokens[admitted].sum())
        return {
            "capacity_bytes": budget.kv_budget_bytes,
            "peak_bytes": max(self._peak_bytes),
            "mean_bytes": mean_bytes,
            "mean_tokens": self._token_time / span_fs if span_fs else 0.0,
            "raw_block_share": sizes.raw_block_share,
            "slot_waste_share": 1 - sizes.encoded_bits / sizes.slot_bits,
            "prefix_hit_token_share": int(calls.cached_tokens.sum()) / max(1, prompt_tokens),
            "re_prefilled_tokens": self._re_prefilled(calls),
            "idle_cached_byte_s": self._idle_unit_time * budget.unit_bytes / FS_PER_S,
            "idle_held_byte_s": sum(state.held_unit_time for state in states) * budget.unit_bytes / FS_PER_S,
            "host_byte_s": self._host_unit_time * budget.unit_bytes / FS_PER_S,
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
        if scenario.cost.model.linear_layers and scenario.prefix_caching:
            notes.append("prefix hits assume that recurrent state can be restored at any block, at no cost")
        return tuple(notes)


def _counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
