"""What must hold in any trace, checked on the table alone, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Trace

_MEND = "correct the row or remove it"


@dataclass(frozen=True, slots=True)
class Law:
    """``checked`` rows or links of which ``broken`` [breaches] are the rows where the rule does not hold."""

    name: str
    rule: str
    checked: int
    broken: NDArray[np.int64]


def laws(trace: Trace) -> Iterator[Law]:
    """Each law with what it was checked on."""
    rows = np.arange(len(trace))
    known = ~np.isnan(trace.arrival_time_s)
    ordered = known if trace.meta.clock == "common" else np.zeros(len(trace), bool)
    clock = trace.arrival_time_s[ordered]
    late = np.concatenate(([False], np.diff(clock) < 0)) if clock.size else np.zeros(0, bool)
    yield Law(
        "arrivals", "arrival_time_s must be finite and at least 0", *_of(known, ~_span(trace.arrival_time_s))
    )
    yield Law("order", "rows must be in order of arrival", clock.size, np.flatnonzero(ordered)[late])
    yield Law("prompts", "input_tokens must be at least 1", len(trace), rows[trace.input_tokens < 1])
    for name, most in (
        ("output_tokens", ""),
        ("reasoning_tokens", "output_tokens"),
        ("recorded_cached_tokens", "input_tokens"),
    ):
        values = getattr(trace, name)
        yield Law(name, f"{name} must be a count or -1", len(trace), rows[values < -1])
        if most:
            limit = getattr(trace, most)
            both = (values >= 0) & (limit >= 0)
            yield Law(f"{name} of {most}", f"{name} must be at most {most}", *_of(both, values > limit))
    for name in ("wait_before_s", "recorded_e2e_s", "recorded_ttft_s"):
        values = getattr(trace, name)
        given = ~np.isnan(values)
        yield Law(name, f"{name} must be finite and at least 0", *_of(given, ~_span(values)))
    yield from _links(trace)
    if trace.meta.hash_scope != "none":
        yield from _chains(trace)


def validate(trace: Trace) -> list[dict[str, Any]]:
    """The laws with how much each was checked on. Raises BadTraceError for the first row that breaks one."""
    found = list(laws(trace))
    broken = [law for law in found if law.broken.size]
    if broken:
        law = min(broken, key=lambda law: int(law.broken[0]))
        others = f" ({sum(law.broken.size for law in broken):,} breaches of {len(broken)} laws)"
        raise BadTraceError(law.rule + others, _place(trace, int(law.broken[0])), _MEND)
    return [{"name": law.name, "rule": law.rule, "checked": law.checked} for law in found]


def _links(trace: Trace) -> Iterator[Law]:
    child, parent = trace.edge_child, trace.edge_parent
    before = (parent >= 0) & (parent < child)
    yield Law("parents", "a parent must be an earlier call", len(child), child[~before])
    wait_s = trace.edge_wait_s
    yield Law(
        "edge waits",
        "a wait must be at least 0 s or unknown",
        len(child),
        child[~np.isnan(wait_s) & ~_span(wait_s)],
    )
    own = np.where(before, parent, child)
    apart = trace.session_id[child] != trace.session_id[own]
    yield Law("parents' sessions", "a parent must be in the call's session", len(child), child[apart])
    early = trace.arrival_time_s[child] < trace.arrival_time_s[own]
    yield Law("causality", "a call must not arrive before its parent", len(child), child[early])
    named = np.flatnonzero(trace.parent_request_id >= 0)
    pairs = set(zip(child.tolist(), parent.tolist(), strict=True))
    stray = [row for row in named.tolist() if (row, int(trace.parent_request_id[row])) not in pairs]
    yield Law(
        "first parents", "parent_request_id must be among the parents", named.size, np.array(stray, np.int64)
    )


def _chains(trace: Trace) -> Iterator[Law]:
    rows = np.arange(len(trace))
    sharing = trace.shared_blocks > 0
    parent = trace.shared_parent
    before = (parent >= 0) & (parent < rows)
    yield Law("shared_parent", "shared_parent must be an earlier call", *_of(sharing, ~before))
    lengths = trace.shared_blocks + trace.new_blocks
    known = np.where(before, lengths[np.where(before, parent, 0)], 0)
    rule = "shared_blocks must be at most the blocks of shared_parent"
    yield Law("shared_blocks", rule, *_of(sharing, trace.shared_blocks > known))
    if trace.meta.hash_scope == "session":
        apart = trace.session_id != trace.session_id[np.where(before, parent, rows)]
        yield Law("scope", "shared_parent must be in the call's session", *_of(sharing, apart))
    _, first = np.unique(trace.block_ids, return_index=True)
    again = np.ones(trace.block_ids.size, bool)
    again[first] = False
    brought_by = np.searchsorted(trace.new_block_start + trace.new_blocks, np.flatnonzero(again), "right")
    yield Law("blocks = chain", "a block must be new once", trace.block_ids.size, brought_by)
    floor, partial = np.divmod(trace.input_tokens, trace.meta.block_size_tokens)
    extra = lengths - floor
    wrong = (extra != 0) & ((extra != 1) | (partial == 0))
    rule = f"a prompt must have one block for every {trace.meta.block_size_tokens} tokens"
    yield Law("blocks of prompts", rule, len(trace), rows[wrong])


def _span(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.isfinite(values) & (values >= 0)


def _of(checked: NDArray[np.bool_], broken: NDArray[np.bool_]) -> tuple[int, NDArray[np.int64]]:
    return int(checked.sum()), np.flatnonzero(checked & broken)


def _place(trace: Trace, row: int) -> str:
    line, name = int(trace.source_row[row]), trace.source_id[row]
    return f"{trace.meta.source}:{line if line >= 0 else row + 1}" + (f" ({name})" if name else "")
