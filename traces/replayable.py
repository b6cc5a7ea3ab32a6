"""The load of a trace as the JSONL that other programs replay: Mooncake's own, and vLLM's timed traces.

Both hold one call a line: when it arrives, how long prompt and answer are, and the ids of its prompt's blocks;
calls are open-loop. What they cannot hold is counted by name. Prefix sharing is exact at the size of their
blocks: an id of a chain stands for all blocks before it, so every n-th id names a block of n times the size.

Sources: Mooncake FAST25-release/traces (timestamp in whole ms, 512 tokens a block); `vllm bench serve
--dataset-name timed_trace`, vllm-project/vllm#39795 and `rust/vllm-bench` of its main branch in autumn 2026
(timestamp times --timed-trace-sec-multiplier; an id gives --timed-trace-chunk-hash-size tokens, the last one
what is left, and a prompt with too few ids comes out short).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvfold.traces.mooncake import BLOCK_TOKENS
from kvfold.traces.prefix import chain_of
from kvfold.traces.table import STATUSES, Ints, Trace

TARGETS = ("mooncake", "vllm-bench")


@dataclass(slots=True)
class Replayable:
    """The lines of a file for ``target``; ``not_held`` is complete when the last line was made."""

    trace: Trace
    target: str
    block_tokens: int
    not_held: Counter[str] = field(default_factory=Counter)

    def lines(self) -> Iterator[bytes]:
        """One JSON object a call, in order of arrival."""
        trace, encoder = self.trace, msgspec.json.Encoder()
        self._columns()
        milliseconds = self.target == "mooncake"
        fresh = int(trace.block_ids.max(initial=-1)) + 1
        outputs = trace.output_tokens.tolist()
        arrivals_s, prompts = trace.arrival_time_s.tolist(), trace.input_tokens.tolist()
        for row, (arrival_s, prompt, output) in enumerate(zip(arrivals_s, prompts, outputs, strict=True)):
            if output < 0 or (output == 0 and not milliseconds):
                self.not_held["calls left out: output_tokens unknown" if output else _NO_OUTPUT] += 1
                continue
            ids, fresh = self._ids(row, prompt, fresh)
            stamp: float | int = arrival_s
            if milliseconds:
                stamp = round(arrival_s * 1e3)
                self.not_held["arrivals rounded to 1 ms"] += stamp / 1e3 != arrival_s
            line = {
                "timestamp": stamp,
                "input_length": prompt,
                "output_length": output,
                "hash_ids": ids,
            }
            yield encoder.encode(line) + b"\n"
        self.not_held = +self.not_held

    def _columns(self) -> None:
        trace = self.trace
        for name in ("session_id", "reasoning_tokens", "recorded_cached_tokens"):
            self.not_held[name] = int((getattr(trace, name) >= 0).sum())
        for name in ("recorded_e2e_s", "recorded_ttft_s"):
            self.not_held[name] = int((~np.isnan(getattr(trace, name))).sum())
        for name in ("source_id", "model", "tenant", "tool_names"):
            self.not_held[name] = sum(map(bool, getattr(trace, name)))
        self.not_held["parents and their waits"] = len(trace.edge_child)
        self.not_held["agent_id"] = int((trace.agent_id > 0).sum())
        self.not_held["status"] = int((trace.status != STATUSES.index("unknown")).sum())

    def _ids(self, row: int, prompt: int, fresh: int) -> tuple[list[int], int]:
        """The ids of one prompt, and the next one that is not in use."""
        blocks = -(-prompt // self.block_tokens)
        size = self.trace.meta.block_size_tokens
        if not size:
            self.not_held[_NO_IDS] += 1
            return list(range(fresh, fresh + blocks)), fresh + blocks
        chain: Ints = chain_of(self.trace, row)
        several = self.block_tokens // size
        ids: list[int] = chain[several - 1 :: several][: prompt // self.block_tokens].tolist()
        if len(ids) < blocks:
            if len(chain) * size >= prompt:
                ids.append(int(chain[-1]))
            else:
                ids.append(fresh)
                fresh += 1
                self.not_held["last blocks whose sharing the source does not tell: not shared"] += 1
        return ids, fresh


_NO_OUTPUT = "calls left out: no output_tokens"
_NO_IDS = "prompts whose sharing the source does not tell: nothing of them is shared"


def replayable(trace: Trace, target: str) -> Replayable:
    """How ``target`` can hold ``trace``. Raises ValueError where it cannot."""
    if target not in TARGETS:
        raise ValueError(f"the target must be one of {', '.join(TARGETS)}, got {target}")
    if trace.meta.clock != "common":
        raise ValueError(f"{target} needs arrivals on one clock, but each session of this trace has its own")
    missing = int(np.isnan(trace.arrival_time_s).sum())
    if missing:
        raise ValueError(f"{target} needs the arrival of every call, but {missing:,} follow a parent only")
    size = trace.meta.block_size_tokens
    block_tokens = BLOCK_TOKENS if target == "mooncake" else size or BLOCK_TOKENS
    if size and block_tokens % size:
        raise ValueError(f"{target} needs blocks of a part of {block_tokens} tokens, got blocks of {size}")
    return Replayable(trace, target, block_tokens)


def command(made: Replayable, path: str) -> str:
    """How the file is replayed, with the options that its units need; empty where no one program reads it."""
    if made.target != "vllm-bench":
        return ""
    options: dict[str, Any] = {
        "--dataset-name": "timed_trace",
        "--dataset-path": path,
        "--num-prompts": len(made.trace) - sum(n for name, n in made.not_held.items() if "left out" in name),
        "--timed-trace-chunk-hash-size": made.block_tokens,
        "--timed-trace-sec-multiplier": 1,
    }
    words = " ".join(f"{name} {value}" for name, value in options.items())
    return f"vllm bench serve {words} --self-timed --disable-shuffle --ignore-eos"
