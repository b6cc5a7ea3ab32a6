"""Model shapes from Hugging Face configurations: a `config.json`, or a preset of `data/models.toml`.

Both hold the same fields and take the same path through `shape_from_config`, so that every parameter count
and KV size that matches a published figure also checks the reader.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfold.sim.errors import ConfigError

PRESETS_FILE = Path(__file__).with_name("data") / "models.toml"

#: model_type -> fields that hold the number of routed experts, the width of one, and the experts per token.
MOE_FIELDS = {
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "kimi_k2": ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "gemma4_text": ("num_experts", "moe_intermediate_size", "top_k_experts"),
    "glm4_moe": ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "gpt_oss": ("num_local_experts", "intermediate_size", "num_experts_per_tok"),
    "minimax_m2": ("num_local_experts", "intermediate_size", "num_experts_per_tok"),
    "mixtral": ("num_local_experts", "intermediate_size", "num_experts_per_tok"),
    "qwen3_5_moe_text": ("num_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "qwen3_vl_moe_text": ("num_experts", "moe_intermediate_size", "num_experts_per_tok"),
    "qwen3_next": ("num_experts", "moe_intermediate_size", "num_experts_per_tok"),
}
DENSE_TYPES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_vl_text")
MLA_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
#: Gated DeltaNet layers between full-attention layers whose query projection also makes an output gate.
GDN_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
LAYER_KINDS = ("full_attention", "sliding_attention", "linear_attention")
LARGEST = 10**9


@dataclass(frozen=True, slots=True)
class Fields:
    """A configuration's fields, with checks that name file, field and value; `assumed` collects defaults."""

    where: str
    values: dict[str, Any]
    assumed: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def count(self, name: str, minimum: int = 1) -> int:
        """A whole number in minimum..10^9; raises ConfigError otherwise."""
        if name not in self.values:
            raise ConfigError(f"{self.where}: field {name} is missing; add it to the configuration")
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= LARGEST:
            raise self.error(name, f"must be a whole number from {minimum} to {LARGEST}")
        return value

    def count_or(self, name: str, default: int, why: str, minimum: int = 1) -> int:
        """The field, or `default` where it is absent or null; the assumption is recorded."""
        if self.has(name):
            return self.count(name, minimum)
        self.assumed.append(f"{name} = {default} ({why})")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def error(self, name: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.where}: field {name} {rule}, got {self.values.get(name)!r}")


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a config.json; raises ConfigError where there is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give a path to a config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON file ({error}); give a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold one JSON object, got {type(config).__name__}")
    return config


def read_presets() -> dict[str, dict[str, Any]]:
    """Configurations of `data/models.toml` by preset name, with `layer_types` spelled out."""
    with PRESETS_FILE.open("rb") as file:
        presets = tomllib.load(file)
    for config in presets.values():
        if "layer_counts" in config:
            config["layer_types"] = [kind for kind, n in config.pop("layer_counts").items() for _ in range(n)]
    return presets


def shape_from_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The keyword arguments of `ModelSpec` that a configuration decides, and `assumed`: the defaults taken.

    A multimodal configuration's `text_config` is what is read. `where` names the file in errors. Raises
    ConfigError for an unknown architecture and for missing or impossible fields.
    """
    text = config.get("text_config")
    if text is not None:
        if not isinstance(text, dict):
            raise ConfigError(f"{where}: field text_config must be an object, got {text!r}")
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    fields = Fields(where, config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in (*MOE_FIELDS, *DENSE_TYPES):
        known = ", ".join(sorted({*MOE_FIELDS, *DENSE_TYPES}))
        raise ConfigError(f"{where}: model_type {kind!r} is not one of the known architectures: {known}")

    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if fields.has(name) and fields.count(name, 0):
            raise fields.error(name, "must be 0 (layers with shared KV or own embeddings are not modelled)")
    layers, hidden, vocab = (
        fields.count(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    counts = _layer_counts(fields, kind, layers)
    attention = _attention(fields, kind, hidden, counts)
    mlp = _mlp(fields, kind, hidden, layers)
    native = fields.count("max_position_embeddings")
    tied_default = kind in ("gemma3_text", "gemma4_text")
    if not fields.has("tie_word_embeddings"):
        fields.assumed.append(f"tie_word_embeddings = {str(tied_default).lower()} (default of {kind})")
    return {
        **attention,
        **mlp,
        "hidden": hidden,
        "vocab": vocab,
        "tied": fields.flag("tie_word_embeddings", tied_default),
        "dense_params": attention["dense_params"] + mlp["dense_params"],
        "embedding_params": vocab * hidden,
        "lm_head_params": vocab * hidden,
        "native_context_tokens": native,
        "max_context_tokens": config.get("max_context_tokens", native),
        "assumed": tuple(fields.assumed),
    }


def _layer_counts(fields: Fields, kind: str, layers: int) -> dict[str, int]:
    """How many layers of each of LAYER_KINDS; MLA layers count as full attention here."""
    listed = fields.values.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers:
            size = len(listed) if isinstance(listed, list) else repr(listed)
            raise ConfigError(f"{fields.where}: field layer_types must list {layers} layers, got {size}")
        for position, name in enumerate(listed):
            if name not in LAYER_KINDS:
                rule = f"must be one of {', '.join(LAYER_KINDS)}, got {name!r}"
                raise ConfigError(f"{fields.where}: field layer_types[{position}] {rule}")
        return {name: listed.count(name) for name in LAYER_KINDS}
    if kind in GDN_TYPES:
        full = layers // fields.count_or("full_attention_interval", 4, f"default of {kind}")
        return {"full_attention": full, "sliding_attention": 0, "linear_attention": layers - full}
    if kind == "gemma3_text":
        full = layers // fields.count_or("sliding_window_pattern", 6, f"default of {kind}")
        return {"full_attention": full, "sliding_attention": layers - full, "linear_attention": 0}
    if kind in ("gpt_oss", "gemma4_text"):
        raise ConfigError(f"{fields.where}: field layer_types is missing; {kind} needs it")
    sliding = 0
    slides_by_default = kind in ("mistral", "mixtral", "phi3")
    if fields.has("sliding_window") and fields.flag("use_sliding_window", slides_by_default):
        first = fields.count("max_window_layers", 0) if fields.has("max_window_layers") else 0
        sliding = max(0, layers - first)
    return {"full_attention": layers - sliding, "sliding_attention": sliding, "linear_attention": 0}


def _attention(fields: Fields, kind: str, hidden: int, counts: dict[str, int]) -> dict[str, Any]:
    """Heads, KV shape and projection parameters of attention and linear layers, without norms and biases."""
    full, sliding, linear = (counts[name] for name in LAYER_KINDS)
    q_heads = fields.count("num_attention_heads")
    if kind in MLA_TYPES:
        return _latent_attention(fields, hidden, q_heads, full)
    if not fields.has("head_dim") and hidden % q_heads:
        raise fields.error(
            "head_dim", f"is missing and hidden_size = {hidden} is no multiple of {q_heads} heads"
        )
    head_dim = fields.count_or("head_dim", hidden // q_heads, "hidden_size / num_attention_heads")
    kv_heads = fields.count_or("num_key_value_heads", q_heads, "num_attention_heads")
    if q_heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads = {q_heads}")
    full_dim, full_kv, kv_projections = head_dim, kv_heads, 2
    if kind == "gemma4_text":
        full_dim = fields.count_or("global_head_dim", head_dim, "head_dim")
        if fields.flag("attention_k_eq_v", False):
            full_kv = fields.count_or("num_global_key_value_heads", kv_heads, "num_key_value_heads")
            kv_projections = 1  # values are the keys, so the layer has no V projection; both are still cached
    gates = 2 if kind in GDN_TYPES else 1
    full_params = hidden * full_dim * (q_heads * (gates + 1) + kv_projections * full_kv)
    sliding_params = hidden * head_dim * (q_heads * 2 + 2 * kv_heads)
    shape: dict[str, Any] = {
        "full_layers": full,
        "sliding_layers": sliding,
        "linear_layers": linear,
        "mla_layers": 0,
        "window_tokens": fields.count("sliding_window") if sliding else 0,
        "q_heads": q_heads,
        "kv_heads": full_kv,
        "head_dim": full_dim,
        "sliding_kv_heads": kv_heads if sliding else 0,
        "sliding_head_dim": head_dim if sliding else 0,
        "dense_params": full * full_params + sliding * sliding_params,
    }
    if linear:
        names = ("key_heads", "value_heads", "key_dim", "value_dim", "conv")
        sources = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        sizes = [fields.count(f"linear_{source}") for source in sources]
        shape |= {f"linear_{name}": size for name, size in zip(names, sizes, strict=True)}
        key_heads, value_heads, key_dim, value_dim, conv = sizes
        keys, values = key_heads * key_dim, value_heads * value_dim
        # projections to q, k, v and the gate z; to beta and the decay; the short convolution; the output
        shape["dense_params"] += linear * (
            hidden * (2 * keys + 2 * values + 2 * value_heads) + conv * (2 * keys + values) + values * hidden
        )
    return shape


def _latent_attention(fields: Fields, hidden: int, q_heads: int, layers: int) -> dict[str, Any]:
    """Multi-head latent attention: kv_lora_rank + qk_rope_head_dim cached elements per token and layer."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rope, nope, value_dim = (fields.count(name) for name in names)
    q_rank = fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0
    q_out = q_heads * (nope + rope)
    q_params = hidden * q_rank + q_rank * q_out if q_rank else hidden * q_out
    kv_params = hidden * (rank + rope) + rank * q_heads * (nope + value_dim)
    return {
        "full_layers": 0,
        "sliding_layers": 0,
        "linear_layers": 0,
        "mla_layers": layers,
        "window_tokens": 0,
        "q_heads": q_heads,
        "kv_heads": 1,
        "head_dim": rank + rope,
        "sliding_kv_heads": 0,
        "sliding_head_dim": 0,
        "mla_rank": rank,
        "mla_rope_dim": rope,
        "dense_params": layers * (q_params + kv_params + q_heads * value_dim * hidden),
    }


def _mlp(fields: Fields, kind: str, hidden: int, layers: int) -> dict[str, int]:
    """Parameters of the gated MLPs (three matrices each), shared and routed experts, and routers."""
    count_field, width_field, top_field = MOE_FIELDS.get(kind, ("", "", ""))
    if not fields.has(count_field):
        if count_field and kind != "gemma4_text":
            raise ConfigError(f"{fields.where}: field {count_field} is missing; {kind} needs it")
        dense = layers * 3 * hidden * fields.count("intermediate_size")
        return {
            "dense_params": dense,
            "mlp_params": dense,
            "moe_layers": 0,
            "experts": 0,
            "experts_per_token": 0,
            "expert_params": 0,
        }
    experts, width, per_token = fields.count(count_field), fields.count(width_field), fields.count(top_field)
    if per_token > experts:
        raise fields.error(top_field, f"must not exceed {count_field} = {experts}")
    moe_layers = _moe_layers(fields, layers)
    mlp = 0
    if moe_layers < layers:
        mlp += (layers - moe_layers) * 3 * hidden * fields.count("intermediate_size")
    if kind == "gemma4_text":
        mlp += moe_layers * 3 * hidden * fields.count("intermediate_size")
    dense = mlp + moe_layers * hidden * experts  # and routers
    if fields.has("n_shared_experts"):
        dense += moe_layers * 3 * hidden * width * fields.count("n_shared_experts", 0)
    if fields.has("shared_expert_intermediate_size"):
        # the shared expert's own gate is one column
        dense += moe_layers * hidden * (3 * fields.count("shared_expert_intermediate_size", 0) + 1)
    return {
        "dense_params": dense,
        "mlp_params": mlp,
        "moe_layers": moe_layers,
        "experts": experts,
        "experts_per_token": per_token,
        "expert_params": 3 * hidden * width,
    }


def _moe_layers(fields: Fields, layers: int) -> int:
    dense_first = fields.count("first_k_dense_replace", 0) if fields.has("first_k_dense_replace") else 0
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if fields.has(name) and fields.count(name) != 1:
            raise fields.error(name, "must be 1 (every layer after the dense ones has experts)")
    dense_only = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense_only, list):
        raise fields.error("mlp_only_layers", "must be a list of layer numbers")
    if dense_first + len(dense_only) > layers:
        raise fields.error("first_k_dense_replace", f"must not exceed num_hidden_layers = {layers}")
    return layers - dense_first - len(dense_only)
