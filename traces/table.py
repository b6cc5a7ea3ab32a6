"""The canonical trace: one row per LLM call, in columns.

Units are in the names. Counts are int64 and -1 where the source does not say; times are float64 seconds from
the trace's origin and NaN where the source does not say. Unknown is never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.errors import BadTraceError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Codes of ``wait_kind`` are positions in this tuple.
WAIT_KINDS = ("none", "tool", "human", "subagent", "mixed", "unknown")
#: Where a wait comes from: recorded by the client, end-to-start of two calls, or start-to-start, which holds the
#: service of the call before it, since the source has no service times.
WAIT_SOURCES = ("none", "recorded", "end_to_start", "start_to_start")
STATUSES = ("ok", "failed", "cancelled", "unknown")


@dataclass(frozen=True, slots=True)
class Meta:
    """What was read, from where, and what the numbers mean.

    ``clock`` is ``common`` (arrivals of all sessions on one clock) or ``session`` (each session starts at its
    own 0, so a replay needs an arrival model or a number of live sessions). ``block_size_tokens`` is 0 where
    the source has no prefix hashes. Raises BadTraceError unless rows_read = rows_kept + all drops.
    """

    format: str
    source: str
    sha256: str
    time_unit: str
    clock: str = "common"
    time_zone: str = ""
    prompt_semantics: str = "whole"
    block_size_tokens: int = 0
    partial_last: str = "none"
    hash_scope: str = "none"
    rows_read: int = 0
    rows_kept: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dropped = sum(self.drops.values())
        if self.rows_read != self.rows_kept + dropped:
            raise BadTraceError(
                f"rows_read must equal rows_kept + drops, got {self.rows_read} != {self.rows_kept} + {dropped}",
                self.source,
            )


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of all calls, sorted by (arrival_time_s, file order); every array has one row per call.

    ``request_id`` is the row number. The prefix chain of call i is the first ``shared_blocks[i]`` blocks of
    the chain of call ``shared_parent[i]`` (an earlier row; -1: none), then
    ``block_ids[new_block_start[i] : new_block_start[i] + new_blocks[i]]``.
    ``edge_*`` hold every parent link, joins too: call ``edge_child`` arrives when all its parents have ended
    and each edge's wait is over; ``edge_wait_s`` is NaN where unknown. A call without edges is a root.
    """

    meta: Meta
    source_id: list[str]
    source_row: Ints
    session_id: NDArray[np.int32]  # -1: single-shot
    turn_index: NDArray[np.int32]
    agent_id: NDArray[np.int32]
    parent_request_id: Ints  # first parent; -1: root
    arrival_time_s: Floats
    wait_before_s: Floats
    wait_kind: NDArray[np.int8]
    wait_source: NDArray[np.int8]
    input_tokens: Ints  # the whole prompt
    output_tokens: Ints
    reasoning_tokens: Ints
    recorded_cached_tokens: Ints
    shared_parent: Ints
    shared_blocks: Ints
    new_block_start: Ints
    new_blocks: Ints
    recorded_e2e_s: Floats
    recorded_ttft_s: Floats
    status: NDArray[np.int8]
    model: list[str]
    tenant: list[str]
    tool_names: list[str]
    block_ids: Ints  # [all new blocks]
    edge_child: Ints  # [edges]
    edge_parent: Ints
    edge_wait_s: Floats
    edge_wait_kind: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.input_tokens)
