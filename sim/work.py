"""What a step computes, how long it takes, and what the engine asks of a step cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.decode_set import DecodeSet
    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.model import ModelSpec

#: Kernel launches, scheduling and output handling that no GPU work hides, per step and per sequence in it.
#: Modelled round figures; leaving them out shifts TTFT and capacity (docs/assumptions.md).
STEP_OVERHEAD_S = 300e-6
SEQUENCE_OVERHEAD_S = 2e-6


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time of a step that no kernel's time holds: per step, per token in it, per sequence sampled from."""

    step_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0


NO_OVERHEAD = Overhead()
MODELLED_OVERHEAD = Overhead(STEP_OVERHEAD_S, 0.0, SEQUENCE_OVERHEAD_S)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt computed in one step: `tokens` new ones after `history_tokens` that are in the KV pool.

    `last` marks the chunk that ends the prompt, whose last token is sampled from.
    """

    tokens: int
    history_tokens: int
    last: bool


class Work(NamedTuple):
    """How long a step takes, and the like ones after it: each `growth_fs` longer than the one before.

    `most` steps at most grow so evenly (None: any number). `origin` says where the attention's cost comes from.
    """

    first_fs: int
    growth_fs: int
    most: int | None
    origin: str


class Cost(Protocol):
    """What the engine asks of a step cost: kvfold.sim.step, or that of a profile (kvfold.sim.profile_cost)."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def gpu(self) -> GpuSpec: ...
    @property
    def sizes(self) -> FormatSizes: ...
    @property
    def tp(self) -> int: ...

    def work(self, decoding: DecodeSet, chunks: Sequence[Chunk]) -> Work: ...
    def decode_fs(self, sequences: int, kv_tokens: int, window_tokens: int, /) -> int: ...
    def base_fs(self, sequences: int, prompt_tokens: int, ending_prompts: int) -> int: ...
    def chunk_fs(self, chunk: Chunk) -> int: ...
