"""Cost of an engine step from a profile's tables: every layer's measured time, added up.

One decoder layer is each row of dense.csv once (its norms twice), one attention call and, in MoE models, one MoE
block; a step is all decoder layers, embedding, final norm, LM head and sampler, and the collectives of its ranks.
Nothing else: the host's work hides behind the step before (kvfold.sim.lookahead); what it does not hide is
`overhead`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING

from kvfold.sim.errors import ConfigError
from kvfold.sim.model import BF16_BYTES
from kvfold.sim.profile import ONCE, TWICE, blend
from kvfold.sim.run import FS_PER_S
from kvfold.sim.step import expected_experts
from kvfold.sim.work import NO_OVERHEAD, Overhead, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.decode_set import DecodeSet
    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.model import ModelSpec
    from kvfold.sim.profile import Curve, Profile
    from kvfold.sim.work import Chunk

_FS_PER_US = FS_PER_S // 10**6


@dataclass(frozen=True, slots=True)
class Link:
    """Between the GPUs of a group: one direction's bandwidth, and the latency of one hop."""

    bytes_per_s: float
    latency_s: float
    origin: str


@dataclass(frozen=True, slots=True)
class ProfileCost:
    """Step times of one rank of a deployment. `data_parallel` ranks hold `1 / data_parallel` of the experts each.

    `graph_sizes`: token counts for which CUDA graphs were captured; a smaller step is padded to the next of them.
    """

    profile: Profile
    model: ModelSpec
    gpu: GpuSpec
    sizes: FormatSizes
    link: Link | None = None
    data_parallel: int = 1
    graph_sizes: tuple[int, ...] = ()
    overhead: Overhead = NO_OVERHEAD
    strict: bool = False
    window_token_fs: int = 0
    _bases: dict[tuple[int, int], tuple[float, bool]] = field(default_factory=dict)
    _shared: dict[int, tuple[float, bool]] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        return self.profile.tp

    @property
    def layers(self) -> int:
        model = self.model
        return model.full_layers + model.sliding_layers + model.linear_layers + model.mla_layers

    def work(self, decoding: DecodeSet, chunks: Sequence[Chunk]) -> Work:
        """The step in which every sequence of `decoding` gains a token and these chunks are computed."""
        count, layers = decoding.count, self.layers
        prompt_tokens = sum(chunk.tokens for chunk in chunks)
        base_us, inside = self._base_us(count + prompt_tokens, count + len(chunks))
        contexts = decoding.lengths() if self.profile.uneven is not None and count > 1 else []
        if chunks:
            chunk, history = _as_one(chunks)
            mean = round(decoding.kv_tokens / count) if count else 0
            attention_us, known = self.profile.attention.mixed_us(chunk, history, count, mean)
            if self.profile.uneven is not None:
                attention_us += self.profile.uneven.us(contexts, chunk)
            first_fs = round((base_us + layers * attention_us) * _FS_PER_US)
            return Work(first_fs, 0, 1, self._origin(inside and known, count, prompt_tokens))
        context = decoding.kv_tokens // count
        line, known = self.profile.attention.decode(count, context)
        if self.profile.uneven is not None:
            base_us += layers * self.profile.uneven.us(contexts, 0)
        token_fs = round(line.slope * layers / count * _FS_PER_US)
        first_fs = round((base_us + layers * line.base) * _FS_PER_US) + token_fs * decoding.kv_tokens
        most = None
        if line.end is not None:
            most = max(1, -(-(line.end * count - decoding.kv_tokens) // count))
        return Work(first_fs, token_fs * count, most, self._origin(inside and known, count, 0))

    def decode_fs(self, sequences: int, kv_tokens: int, _: int) -> int:
        """A step in which `sequences` sequences of equal contexts gain one token each."""
        if not sequences:
            return 0
        context = kv_tokens // sequences
        line, _known = self.profile.attention.decode(sequences, context)
        attention_us = self.layers * (line.base + line.slope * context)
        return self.base_fs(sequences, 0, 0) + round(attention_us * _FS_PER_US)

    def base_fs(self, sequences: int, prompt_tokens: int, ending_prompts: int) -> int:
        """What a step costs whatever the lengths of its contexts."""
        return round(
            self._base_us(sequences + prompt_tokens, sequences + max(1, ending_prompts))[0] * _FS_PER_US
        )

    def chunk_fs(self, chunk: Chunk) -> int:
        """Attention of one chunk of a prompt alone."""
        size, history = _as_one([chunk])
        return round(self.layers * self.profile.attention.mixed_us(size, history, 0, 0)[0] * _FS_PER_US)

    def _base_us(self, tokens: int, sequences: int) -> tuple[float, bool]:
        """All but attention; and whether it was measured."""
        key = (tokens, sequences)
        if key not in self._bases:
            self._bases[key] = self._sum_us(*key)
        return self._bases[key]

    def _sum_us(self, tokens: int, sequences: int) -> tuple[float, bool]:
        profile, padded = self.profile, self._padded(tokens)
        time_us, inside = 0.0, True
        for layer, curve in profile.dense.items():
            times = 1 if layer in ONCE else self.layers * (2 if layer in TWICE else 1)
            time_us += times * curve.at(padded)
            inside &= curve.covers(padded)
        for curve in profile.per_sequence.values():
            time_us += curve.at(sequences)
            inside &= curve.covers(sequences)
        shared_us, known = self._shared_us(tokens * self.data_parallel)
        time_us += shared_us + 1e6 * self._collectives_s(tokens, sequences)
        overhead = self.overhead
        time_us += 1e6 * (overhead.step_s + overhead.token_s * tokens + overhead.sequence_s * sequences)
        return time_us, inside and known

    def shared_fs(self, group_tokens: int) -> int:
        """What data-parallel ranks compute together for so many tokens of all of them (kvfold.sim.lockstep):
        the experts, and what is gathered and scattered for them."""
        return round(self._shared_us(group_tokens)[0] * _FS_PER_US)

    def _shared_us(self, group_tokens: int) -> tuple[float, bool]:
        """All MoE blocks of one rank, for the tokens of all ranks; and whether they were measured."""
        if self.profile.moe is None:
            return 0.0, True
        if group_tokens not in self._shared:
            block_us, known = self._experts_us(self.profile.moe, group_tokens)
            block_us += 1e6 * self._exchange_s(group_tokens)
            self._shared[group_tokens] = self.model.moe_layers * block_us, known
        return self._shared[group_tokens]

    def _experts_us(self, table: dict[int, Curve], group_tokens: int) -> tuple[float, bool]:
        """One MoE block. A rank has its share of the experts, and computes its share of the tokens' pairs."""
        model, ranks = self.model, self.data_parallel
        tokens = group_tokens / ranks
        distinct = expected_experts(model.experts, model.experts_per_token, group_tokens) / ranks
        sizes = sorted(table)
        time_us, inside = 0.0, sizes[0] <= tokens <= sizes[-1]
        for size, share in blend(sizes, tokens):
            curve = table[size]
            time_us += share * sum(
                part * curve.ys[curve.xs.index(known)]
                for known, part in blend(curve.xs, min(distinct, curve.xs[-1]))
            )
        return time_us, inside

    def _exchange_s(self, group_tokens: int) -> float:
        """The tokens of all ranks gathered to each, and its experts' results scattered, over a ring of ranks."""
        link, ranks = self.link, self.data_parallel
        if link is None or ranks == 1:
            return 0.0
        chunk_bytes = BF16_BYTES * self.model.hidden * group_tokens / ranks
        return 2 * (ranks - 1) * (link.latency_s + chunk_bytes / link.bytes_per_s)

    def _collectives_s(self, tokens: int, sequences: int) -> float:
        """Of `tp` GPUs in a ring: an all-reduce after the embedding and two a layer, and all logits gathered
        (vLLM's VocabParallelEmbedding, RowParallelLinear, LogitsProcessor)."""
        link, tp = self.link, self.tp
        if link is None or tp == 1:
            return 0.0
        model = self.model
        moved_bytes = BF16_BYTES * tokens * model.hidden
        reduce_s = 2 * (tp - 1) * (link.latency_s + moved_bytes / tp / link.bytes_per_s)
        logits_bytes = BF16_BYTES * sequences * model.vocab / tp
        gather_s = (tp - 1) * (link.latency_s + logits_bytes / link.bytes_per_s)
        return (1 + 2 * self.layers) * reduce_s + gather_s

    def _padded(self, tokens: int) -> int:
        sizes = self.graph_sizes
        return sizes[bisect_left(sizes, tokens)] if sizes and tokens <= sizes[-1] else tokens

    def _origin(self, inside: bool, sequences: int, prompt_tokens: int) -> str:
        if self.strict and not inside:
            raise ConfigError(
                f"--strict-costs takes measured costs alone, and a step of {sequences} sequences and "
                f"{prompt_tokens} prompt tokens is outside of {self.profile.source}; leave the option out, or "
                "profile a wider grid"
            )
        return "interpolated" if inside else "extrapolated"


def _as_one(chunks: Sequence[Chunk]) -> tuple[float, float]:
    """(tokens, history) of one chunk with as many query-key pairs as all of these, within and with the past."""
    own = sqrt(sum(chunk.tokens * chunk.tokens for chunk in chunks))
    return own, sum(chunk.tokens * chunk.history_tokens for chunk in chunks) / own
