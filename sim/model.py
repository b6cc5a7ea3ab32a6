"""A model as the simulator sees it: what it stores per token and per sequence, and what one step reads of it.

Counts leave out norms and biases (below 0.05 % in every preset) and layers for multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

from kvfold.sim.errors import ConfigError, near_names
from kvfold.sim.model_config import read_config, read_presets, shape_from_config

BF16_BYTES = 2
#: Bytes per parameter of the weight formats; embedding and LM head stay BF16 in all of them.
#: w4a16: int4 in groups of 128 with an FP16 scale and an FP16 zero each, (4 + 32 / 128) / 8 bytes.
#: w4a16-mlp: the same for MLPs and routed experts alone; attention, linear layers, shared experts and routers stay
#: BF16, as in Qwen's own GPTQ-Int4 checkpoints of Qwen3.5 (their config.json leaves out attn and shared_expert).
WEIGHT_BYTES = {
    "bf16": Fraction(2),
    "fp8": Fraction(1),
    "w4a16": Fraction(17, 32),
    "w4a16-mlp": Fraction(17, 32),
}


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes per GPU of a tensor-parallel group.

    `lm_head` is what a step reads, even where it is the embedding itself (tied); `total` is what lies in
    memory and counts a tied matrix once.
    """

    dense: int
    experts: int
    embedding: int
    lm_head: int
    total: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder, its layers counted by kind of attention.

    `kv_heads` and `head_dim` are those of full layers, the `sliding_*` ones those of sliding-window layers;
    an MLA layer caches one latent of `mla_rank + mla_rope_dim` elements per token. Methods take `tp`, the
    size of a tensor-parallel group, and answer per GPU; they raise ConfigError where heads do not split so.
    """

    name: str
    full_layers: int
    sliding_layers: int
    linear_layers: int
    mla_layers: int
    window_tokens: int  # 0: no sliding-window layers
    q_heads: int
    kv_heads: int
    head_dim: int
    sliding_kv_heads: int
    sliding_head_dim: int
    hidden: int
    vocab: int
    tied: bool
    dense_params: int  # read by every step: attention, MLPs, shared experts, routers
    mlp_params: int  # of these: MLPs that every token takes, shared experts left out
    moe_layers: int
    experts: int
    experts_per_token: int
    expert_params: int  # one routed expert of one layer
    embedding_params: int
    lm_head_params: int  # read by every step that samples, even if tied
    native_context_tokens: int
    max_context_tokens: int
    source: str
    verified: str
    mla_rank: int = 0
    mla_rope_dim: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0

    @property
    def total_params(self) -> int:
        """All parameters, embedding and LM head included, a tied matrix once."""
        head = 0 if self.tied else self.lm_head_params
        routed = self.moe_layers * self.experts * self.expert_params
        return self.dense_params + routed + self.embedding_params + head

    @property
    def active_params(self) -> int:
        """Parameters that one token uses, embeddings included (vendors often leave them out)."""
        idle = self.moe_layers * (self.experts - self.experts_per_token) * self.expert_params
        return self.total_params - idle

    def kv_elements_per_token(self, tp: int = 1) -> int:
        """Elements cached per context token in the layers that grow with the context.

        Full layers: K and V of every KV head, at least one head a GPU; MLA layers: the latent, on every GPU.
        """
        full = self.full_layers * 2 * self._share("kv_heads", tp) * self.head_dim
        return full + self.mla_layers * (self.mla_rank + self.mla_rope_dim)

    def window_kv_elements_per_token(self, tp: int = 1) -> int:
        """Elements cached per token of min(context, window) in the sliding-window layers."""
        if not self.sliding_layers:
            return 0
        return self.sliding_layers * 2 * self._share("sliding_kv_heads", tp) * self.sliding_head_dim

    def kv_bytes_per_token(self, bits_per_element: float = 16, tp: int = 1) -> int:
        """Bytes that one more context token adds, rounded up; windows and state are constant."""
        return ceil(Fraction(bits_per_element) * self.kv_elements_per_token(tp) / 8)

    def kv_bytes_bounds(self, context_tokens: int, tp: int = 1) -> tuple[int, int]:
        """BF16 KV bytes of one sequence: (min, reserved).

        min: sliding-window layers keep only their window; reserved: every layer keeps the whole context.
        """
        grown = self.kv_elements_per_token(tp) * context_tokens
        window = self.window_kv_elements_per_token(tp)
        kept = grown + window * min(context_tokens, self.window_tokens)
        return BF16_BYTES * kept, BF16_BYTES * (grown + window * context_tokens)

    def state_bytes_per_sequence(self, tp: int = 1) -> int:
        """Recurrent state of the linear layers, FP32: per layer n_v * d_k * d_v, and the convolution's last
        inputs, (conv - 1) * (2 * n_k * d_k + n_v * d_v)."""
        if not self.linear_layers:
            return 0
        keys = self._share("linear_key_heads", tp) * self.linear_key_dim
        value_heads = self._share("linear_value_heads", tp)
        recurrent = value_heads * self.linear_key_dim * self.linear_value_dim
        conv = (self.linear_conv - 1) * (2 * keys + value_heads * self.linear_value_dim)
        return self.linear_layers * 4 * (recurrent + conv)

    def attention_flops_per_pair(self, tp: int = 1) -> int:
        """Floating-point operations of one query token and one KV token, in all layers that grow.

        Full layers: 4 * q_heads * head_dim (QK^T and PV, multiply and add). MLA layers in the absorbed form
        in which decode runs them: scores over rank + rope, values over rank.
        """
        q_heads = self._query_share(tp)
        full = self.full_layers * 4 * q_heads * self.head_dim
        return full + self.mla_layers * 2 * q_heads * (2 * self.mla_rank + self.mla_rope_dim)

    def sliding_attention_flops_per_pair(self, tp: int = 1) -> int:
        """The same of the sliding-window layers, per KV token inside the window."""
        return self.sliding_layers * 4 * self._query_share(tp) * self.sliding_head_dim

    def weights_bytes(self, weights: str, tp: int = 1) -> WeightBytes:
        """Bytes of the weights in a format of WEIGHT_BYTES, every matrix split evenly over the group."""
        if weights not in WEIGHT_BYTES:
            raise ConfigError(f"--weights must be one of {', '.join(WEIGHT_BYTES)}, got {weights!r}")
        self._query_share(tp)
        per_param = WEIGHT_BYTES[weights]
        kept_params = self.dense_params - self.mlp_params if weights == "w4a16-mlp" else 0
        dense = ceil((per_param * (self.dense_params - kept_params) + BF16_BYTES * kept_params) / tp)
        experts = ceil(per_param * self.moe_layers * self.experts * self.expert_params / tp)
        embedding = ceil(Fraction(BF16_BYTES * self.embedding_params, tp))
        lm_head = ceil(Fraction(BF16_BYTES * self.lm_head_params, tp))
        total = dense + experts + embedding + (0 if self.tied else lm_head)
        return WeightBytes(dense, experts, embedding, lm_head, total)

    def _query_share(self, tp: int) -> int:
        if tp < 1 or self.q_heads % tp:
            raise ConfigError(f"--tp must divide the {self.q_heads} query heads of {self.name}, got {tp}")
        return self.q_heads // tp

    def _share(self, heads_field: str, tp: int) -> int:
        """Heads per GPU: an even share, or one that several GPUs hold where heads are fewer than GPUs."""
        heads: int = getattr(self, heads_field)
        if tp < 1 or (heads % tp and tp % heads):
            raise ConfigError(
                f"--tp must divide {heads_field} = {heads} of {self.name} or be its multiple, got {tp}"
            )
        return max(1, heads // tp)


def preset_names() -> list[str]:
    """Names that `load_model` knows without a file, in the order of the presets file."""
    return list(read_presets())


def load_model(name_or_path: str) -> ModelSpec:
    """A preset by name, or the model of a Hugging Face config.json.

    Raises ConfigError for an unknown name (with close matches) and for a configuration that cannot be read.
    Defaults taken for absent fields are listed in `source`.
    """
    path = Path(name_or_path)
    if path.suffix == ".json" or path.is_file():
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _spec(name, read_config(path), str(path), f"file {path}", "given by the user")
    presets = read_presets()
    key = name_or_path.lower()
    if key not in presets:
        near = near_names(key.rsplit("/", 1)[-1], presets)
        hint = f"did you mean {', '.join(near)}?" if near else "give a preset or a path to a config.json"
        raise ConfigError(f"unknown model {name_or_path!r}; {hint} (kvfold list models shows the presets)")
    config = presets[key]
    return _spec(key, config, f"preset {key}", config.pop("source"), config.pop("verified"))


def _spec(name: str, config: dict[str, object], where: str, source: str, verified: str) -> ModelSpec:
    shape = shape_from_config(config, where)
    assumed = shape.pop("assumed")
    if assumed:
        source += f"; assumed: {', '.join(assumed)}"
    return ModelSpec(name=name, source=source, verified=verified, **shape)
