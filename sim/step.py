"""Cost of one engine step, term by term, in integer femtoseconds.

Integers make the coalesced and the stepwise simulation agree bit for bit: within a run of equal steps the cost
grows linearly, so the sum of k steps has a closed form without rounding.

Decode attention and linear layers come from a measured cost table where there is one for the GPU. Every other
term is `modelled`: bytes over datasheet bandwidth, or operations over datasheet FLOP/s, each times the one
efficiency of the GPU profile (sim/data/gpus.toml). No constant is fitted to a run.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from kvfold.sim.costs import CostTable, PrefillTable, Segment
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import require
from kvfold.sim.model import WEIGHT_BYTES
from kvfold.sim.run import FS_PER_S
from kvfold.sim.work import MODELLED_OVERHEAD, Chunk, Overhead, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.decode_set import DecodeSet
    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.model import ModelSpec

#: One all-reduce's latency besides its bytes (NCCL, one node); modelled.
COLLECTIVE_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the step table; `speed_of_light_s` is the time at full datasheet bandwidth or FLOP/s."""

    name: str
    s: float
    speed_of_light_s: float
    origin: str


def _fs(seconds: float) -> int:
    return round(seconds * FS_PER_S)


def expected_experts(
    experts: int, per_token: int, tokens: int, shares: Sequence[float] | None = None
) -> float:
    """Expected number of distinct experts that `tokens` tokens touch in a layer, tokens routed independently.

    Uniform: each expert is missed by one token with probability 1 - per_token / experts. With `shares`, of each
    expert in all routed tokens (they sum to 1), expert i is missed with probability 1 - per_token * shares[i],
    which is exact where no share exceeds 1 / per_token. Uniform shares give the largest number.
    """
    if experts == 0:
        return 0.0
    if shares is None:
        return experts * (1.0 - (1.0 - per_token / experts) ** tokens)
    return sum(1.0 - max(0.0, 1.0 - per_token * share) ** tokens for share in shares)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Step time of one model on one GPU (or tensor-parallel group) with one KV format.

    `kv_token_fs` is the cost of one context token of one decoding sequence, `window_token_fs` the same for its
    sliding-window layers; `history_token_fs(chunk)` that of one token of history under a prefill chunk.
    """

    model: ModelSpec
    gpu: GpuSpec
    sizes: FormatSizes
    weights: str
    tp: int
    kv_token_fs: int
    window_token_fs: int
    pair_fs: int
    window_pair_fs: int
    history_read_fs: int
    unpack_token_fs: int
    _bandwidth: float
    _flops: float
    costs: CostTable | None = None
    overhead: Overhead = MODELLED_OVERHEAD
    strict: bool = (
        False  # raise ConfigError rather than use attention or linear layers that were not measured
    )
    _bases: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _own_pairs: dict[int, tuple[int, int]] = field(default_factory=dict)  # by tokens of a chunk
    _segments: dict[int, tuple[list[int], list[Segment]]] = field(default_factory=dict)

    def work(self, decoding: DecodeSet, chunks: Sequence[Chunk]) -> Work:
        """The step in which every sequence of `decoding` gains a token and these chunks are computed."""
        count = decoding.count
        prompt_tokens = ending = first_fs = growth_fs = longest_wait_fs = 0
        for chunk in chunks:
            prompt_tokens += chunk.tokens
            ending += chunk.last
            alone_fs, beside_fs = self._chunk_fs(chunk)
            first_fs += beside_fs
            longest_wait_fs = max(longest_wait_fs, alone_fs - beside_fs)
        first_fs += longest_wait_fs
        if chunks and not ending:  # a step that ends a prompt has no like one after it
            growth_fs = self.history_token_fs(prompt_tokens) * prompt_tokens
        first_fs += self.base_fs(count, prompt_tokens, ending)
        first_fs += self.window_token_fs * decoding.window_tokens
        if not count:
            return Work(first_fs, growth_fs, None, "")
        attention = self.attention(count, decoding.kv_tokens)
        first_fs += attention.base_fs + attention.token_fs * decoding.kv_tokens
        growth_fs += attention.token_fs * count + self.window_token_fs * decoding.growing_windows
        most = None
        if attention.until_tokens is not None:
            most = (attention.until_tokens - decoding.kv_tokens) // count + 1
        return Work(first_fs, growth_fs, most, attention.origin)

    def decode_fs(self, sequences: int, kv_tokens: int, window_tokens: int) -> int:
        """A step in which `sequences` sequences with `kv_tokens` context tokens in all gain one token each."""
        attention = self.attention(sequences, kv_tokens)
        return (
            self.base_fs(sequences, 0, 0)
            + attention.base_fs
            + attention.token_fs * kv_tokens
            + self.window_token_fs * window_tokens
        )

    def attention(self, sequences: int, kv_tokens: int) -> Segment:
        """Attention over what grows with the context: measured where there is a table, else modelled."""
        if sequences not in self._segments:
            self._segments[sequences] = self._attention_segments(sequences)
        starts, segments = self._segments[sequences]
        found = segments[bisect_right(starts, kv_tokens) - 1]
        if self.strict and found.origin != "interpolated":
            self._refuse(
                f"decode attention of a batch of {sequences:,} with {kv_tokens:,} KV tokens in all",
                found.origin,
            )
        return found

    def _attention_segments(self, sequences: int) -> tuple[list[int], list[Segment]]:
        model = self.model
        table = self.costs.attend.get(self.sizes.name) if self.costs else None
        if not sequences:
            return [0], [
                Segment(0, 0, None, "interpolated")
            ]  # nothing decodes: no attention, whatever the table
        if table is None or not model.full_layers:
            return [0], [Segment(0, self.kv_token_fs, None, "modelled")]
        layers = model.kv_elements_per_token(self.tp) / (2 * table.kv_heads * table.head_dim)
        shape = (model.q_heads // self.tp, max(1, model.kv_heads // self.tp), model.head_dim)
        same = shape == (table.q_heads, table.kv_heads, table.head_dim) and not model.mla_layers
        return table.segments(sequences, layers, same)

    def _refuse(self, what: str, origin: str) -> NoReturn:
        raise ConfigError(
            f"--strict-costs takes measured attention and linear layers alone, and {what} is {origin} for "
            f"{self.model.name} on {self.gpu.name}; leave the option out, or measure the point with "
            "kvfold kernels bench (contexts from 256 tokens on) and give its table by --costs"
        )

    def base_fs(self, sequences: int, prompt_tokens: int, ending_prompts: int) -> int:
        """What a step costs whatever the lengths of its contexts: weights, overhead, sampling, packing."""
        key = (sequences, prompt_tokens, ending_prompts)
        found = self._bases.get(key)
        if found is None:
            found = sum(row[1] for row in self._base_terms(*key))
            self._bases[key] = found
        return found

    @property
    def measured_prefill(self) -> PrefillTable | None:
        """What was measured of prompt attention with heads like this model's; None: it is modelled."""
        table = self.costs.prefill if self.costs and self.model.full_layers else None
        return table if table is not None and table.head_dim == self.model.head_dim else None

    def chunk_fs(self, chunk: Chunk) -> int:
        """Prefill attention of a step's only chunk, over its history and over itself."""
        return self._chunk_fs(chunk)[0]

    def history_token_fs(self, chunk_tokens: int) -> int:
        """Cost of one history token for a step's only chunk."""
        return self._history_fs(chunk_tokens)[0]

    def _chunk_fs(self, chunk: Chunk) -> tuple[int, int]:
        """Prefill attention of one chunk by itself, and what it adds to a launch that others fill.

        One launch attends to all chunks of a step. A short one alone leaves most of the GPU idle, and others fill
        that: what the launch takes beyond all pairs at full rate is what the chunk that is farthest from it takes.
        """
        tokens, history = chunk.tokens, chunk.history_tokens
        own = self._own_pairs.get(tokens)
        if own is None:
            pairs = tokens * (tokens + 1) // 2
            alone, full = self._pair_fs(tokens, False)
            own = self._own_pairs[tokens] = round(alone * pairs), round(full * pairs)
        alone_fs, beside_fs = own
        if self.window_pair_fs:
            windows_fs = self.window_pair_fs * tokens * min(self.model.window_tokens, history + tokens)
            alone_fs, beside_fs = alone_fs + windows_fs, beside_fs + windows_fs
        if history:
            token_fs, full_token_fs = self._history_fs(tokens)
            alone_fs, beside_fs = alone_fs + token_fs * history, beside_fs + full_token_fs * history
        return alone_fs, beside_fs

    def _history_fs(self, chunk_tokens: int) -> tuple[int, int]:
        """Cost of one history token, as above: its attention pairs, or its KV read; and the unpacking of it.

        Prefill keeps its ordinary attention, so packed history is unpacked to memory first and read again.
        """
        alone, full = (
            max(round(chunk_tokens * rate), self.history_read_fs) + self.unpack_token_fs
            for rate in self._pair_fs(chunk_tokens, True)
        )
        return alone, full

    def _pair_fs(self, chunk_tokens: int, with_history: bool) -> tuple[float, float]:
        """One query-key pair in all layers: at the measured rate of such a chunk, and at the best of any chunk."""
        table, model = self.measured_prefill, self.model
        if table is None:
            found: tuple[float, float] = (self.pair_fs, self.pair_fs)
            origin = "modelled"
        else:
            rate_fs, origin = table.pair_fs(chunk_tokens, with_history)
            scale = model.full_layers * model.q_heads / self.tp / table.q_heads
            found = (rate_fs * scale, table.full_pair_fs(with_history) * scale)
        if self.strict and origin != "interpolated":
            self._refuse(f"prefill attention of a chunk of {chunk_tokens:,} tokens", origin)
        return found

    def terms(self, sequences: int, kv_tokens: int, window_tokens: int) -> list[Term]:
        """The table of one pure decode step; the sum of `s` is `decode_fs` to within a femtosecond a row."""
        model, sizes = self.model, self.sizes
        rows = self._base_terms(sequences, 0, 0)
        elements = model.kv_elements_per_token(self.tp) * kv_tokens
        read_s = elements * _read_bits(sizes) / 8 / self._bandwidth
        light = self.gpu.bandwidth_efficiency
        attention = self.attention(sequences, kv_tokens)
        total_fs = attention.base_fs + attention.token_fs * kv_tokens
        if attention.origin == "modelled":
            work_s = elements * _work_s_per_element(self.gpu, sizes)
            # per-token rounding is the read's: a format without decode work shows none
            read_fs = min(_fs(read_s), total_fs) if work_s else total_fs
            work_light_s = work_s * self.gpu.compute_efficiency
            rows.insert(0, ("attention: KV read", read_fs, read_s * light, "modelled"))
            rows.insert(1, ("attention: decode work", total_fs - read_fs, work_light_s, "modelled"))
        else:
            rows.insert(0, ("attention: kernel", total_fs, read_s * light, attention.origin))
        if model.sliding_layers:
            window_fs = self.window_token_fs * window_tokens
            window_light_s = window_fs / FS_PER_S * light
            rows.append(("attention: windows", window_fs, window_light_s, "modelled"))
        return [Term(name, fs / FS_PER_S, light_s, origin) for name, fs, light_s, origin in rows]

    def _base_terms(
        self, sequences: int, prompt_tokens: int, ending_prompts: int
    ) -> list[tuple[str, int, float, str]]:
        """(name, femtoseconds, speed-of-light seconds, origin) of every term that no context length enters."""
        model, gpu, tp = self.model, self.gpu, self.tp
        tokens, sampled = sequences + prompt_tokens, sequences + ending_prompts
        weights = model.weights_bytes(self.weights, tp)
        rows: list[tuple[str, int, float, str]] = []

        def add(name: str, count_bytes: float, flops: float = 0.0) -> None:
            slower_s = max(count_bytes / self._bandwidth, flops / self._flops if flops else 0.0)
            light_s = max(
                count_bytes / gpu.bandwidth_bytes_per_s,
                flops / require(gpu, "bf16_flops_per_s") if flops else 0.0,
            )
            rows.append((name, _fs(slower_s), light_s, "modelled"))

        add("linear layers", weights.dense, 2 * model.dense_params / tp * tokens)
        measured = self._linear_us(tokens)
        if self.strict and (measured is None or measured[1] != "interpolated"):
            self._refuse(f"linear layers of {tokens:,} tokens", measured[1] if measured else "modelled")
        if measured is not None:
            rows[-1] = ("linear layers", _fs(measured[0] / 1e6), rows[-1][2], measured[1])
        if model.moe_layers:
            distinct = expected_experts(model.experts, model.experts_per_token, tokens)
            active = model.experts_per_token * model.expert_params * model.moe_layers / tp
            add("experts", weights.experts * distinct / model.experts, 2 * active * tokens)
        add("LM head", weights.lm_head if sampled else 0, 2 * model.lm_head_params / tp * sampled)
        # logits are written in FP32, read for the softmax and read for the draw
        add("sampling", 3 * 4 * model.vocab / tp * sampled)
        elements = model.kv_elements_per_token(tp)
        add("KV write", (elements + model.window_kv_elements_per_token(tp)) * 2 * tokens)
        if self.sizes.packed:
            add("pack filled blocks", elements * (2 + self.sizes.encoded_bits / 8) * tokens)
            # the raw tail holds (block_tokens - 1) / 2 tokens on average, read at 16 bits instead of packed ones
            tail_tokens = (self.sizes.block_tokens - 1) / 2 * sequences
            add("raw tails", elements * (16 - _read_bits(self.sizes)) / 8 * tail_tokens)
        if model.linear_layers:
            add("recurrent state", 2 * model.state_bytes_per_sequence(tp) * (sequences + (prompt_tokens > 0)))
        if tp > 1:
            layers = model.full_layers + model.sliding_layers + model.linear_layers + model.mla_layers
            moved_s = 2 * (tp - 1) / tp * tokens * model.hidden * 2 / require(gpu, "link_bytes_per_s")
            all_s = 2 * layers * (moved_s + COLLECTIVE_LATENCY_S)
            rows.append(("collectives", _fs(all_s), 2 * layers * moved_s, "modelled"))
        overhead = self.overhead
        overhead_s = overhead.step_s + overhead.token_s * tokens + overhead.sequence_s * sampled
        rows.append(("launch and scheduling", _fs(overhead_s), 0.0, "modelled"))
        return rows

    def _linear_us(self, tokens: int) -> tuple[float, str] | None:
        """All linear layers of a dense model from measured products of the same weight bytes; None: not measured.

        Per layer QKV, output, gate and up together, and down projection; what attention does not take of the
        layer's parameters is the MLP, a third of it per matrix.
        """
        model = self.model
        table = self.costs.linear.get(self.weights) if self.costs else None
        if table is None or not tokens or model.moe_layers or not model.full_layers or model.mla_layers:
            return None
        if model.linear_layers or model.sliding_layers:
            return None
        query = model.q_heads * model.head_dim * model.hidden
        key_value = 2 * model.kv_heads * model.head_dim * model.hidden
        mlp = model.dense_params // model.full_layers - 2 * query - key_value
        per_param = float(WEIGHT_BYTES[self.weights]) / self.tp
        parts = [
            table.time_us(tokens, params * per_param)
            for params in (query + key_value, query, 2 * mlp / 3, mlp / 3)
        ]
        origin = "interpolated" if all(part[1] == "interpolated" for part in parts) else "extrapolated"
        return model.full_layers * sum(part[0] for part in parts), origin


def _read_bits(sizes: FormatSizes) -> float:
    """Mean bits that attention reads per element of full blocks: encoded, or raw where a block stayed raw."""
    return (1 - sizes.raw_block_share) * sizes.encoded_bits + sizes.raw_block_share * 16


def _work_s_per_element(gpu: GpuSpec, sizes: FormatSizes) -> float:
    """Integer work of decoding one element in registers, at the GPU's one compute efficiency."""
    ops = sizes.decode_int_ops_per_element
    if ops == 0:
        return 0.0
    lanes_per_s = (
        require(gpu, "sm_count") * require(gpu, "int_lanes_per_sm") * require(gpu, "clock_hz")
    ) * gpu.compute_efficiency
    return ops / lanes_per_s


def _combined_s(read_s: float, work_s: float, sizes: FormatSizes) -> float:
    """Reading and decoding together: `decode_overlap` of the shorter one hides behind the longer one."""
    return max(read_s, work_s) + (1 - sizes.decode_overlap) * min(read_s, work_s)


def step_cost(
    model: ModelSpec,
    gpu: GpuSpec,
    sizes: FormatSizes,
    weights: str = "bf16",
    tp: int = 1,
    costs: CostTable | None = None,
    strict: bool = False,
    overhead: Overhead = MODELLED_OVERHEAD,
) -> StepCost:
    """Coefficients of the step time; raises ConfigError where the GPU profile lacks a figure that they need."""
    bandwidth = gpu.bandwidth_bytes_per_s * gpu.bandwidth_efficiency
    flops = require(gpu, "bf16_flops_per_s") * gpu.compute_efficiency

    def token_fs(elements: int) -> int:
        read_s = elements * _read_bits(sizes) / 8 / bandwidth
        return _fs(_combined_s(read_s, elements * _work_s_per_element(gpu, sizes), sizes))

    elements = model.kv_elements_per_token(tp)
    unpack_s = 0.0
    if sizes.packed:
        moved_s = elements * (_read_bits(sizes) / 8 + 2) / bandwidth
        unpack_s = _combined_s(moved_s, elements * _work_s_per_element(gpu, sizes), sizes)
    return StepCost(
        model=model,
        gpu=gpu,
        sizes=sizes,
        weights=weights,
        tp=tp,
        kv_token_fs=token_fs(elements),
        # windows stay BF16 in every format: a block is packed once, and a window drops it again
        window_token_fs=_fs(model.window_kv_elements_per_token(tp) * 2 / bandwidth),
        pair_fs=_fs(model.attention_flops_per_pair(tp) / flops),
        window_pair_fs=_fs(model.sliding_attention_flops_per_pair(tp) / flops),
        history_read_fs=_fs(elements * 2 / bandwidth),
        unpack_token_fs=_fs(unpack_s),
        _bandwidth=bandwidth,
        _flops=flops,
        costs=costs,
        overhead=overhead,
        strict=strict,
    )
