"""Model shapes: published counts and KV sizes first, then the laws of splitting, then what the reader refuses."""

import json

import pytest

from kvfold.sim.errors import ConfigError
from kvfold.sim.model import ModelSpec, load_model, preset_names

MIB = 2**20

# name, (full, sliding, linear, MLA) layers, parameters and active ones in 10^9, BF16 KV bytes per token of context
# and per token of a window, state per sequence in MiB: figures of the models' cards and of public size tables
PUBLISHED = [
    ("llama-3.1-8b", (32, 0, 0, 0), 8.03, 8.03, 131_072, 0, 0),
    ("llama-3.1-70b", (80, 0, 0, 0), 70.55, 70.55, 327_680, 0, 0),
    ("llama-3.1-405b", (126, 0, 0, 0), 405.85, 405.85, 516_096, 0, 0),
    ("qwen3-0.6b", (28, 0, 0, 0), 0.60, 0.60, 114_688, 0, 0),
    ("qwen3-8b", (36, 0, 0, 0), 8.19, 8.19, 147_456, 0, 0),
    ("qwen3-14b", (40, 0, 0, 0), 14.77, 14.77, 163_840, 0, 0),
    ("qwen3-32b", (64, 0, 0, 0), 32.76, 32.76, 262_144, 0, 0),
    ("qwen3-30b-a3b", (48, 0, 0, 0), 30.53, 3.35, 98_304, 0, 0),
    ("qwen3-235b-a22b", (94, 0, 0, 0), 235.09, 22.19, 192_512, 0, 0),
    ("qwen3.5-27b", (16, 0, 48, 0), 26.90, 26.90, 65_536, 0, 149.62),
    ("qwen3.6-27b", (16, 0, 48, 0), 26.90, 26.90, 65_536, 0, 149.62),
    ("qwen3.5-35b-a3b", (10, 0, 30, 0), 34.66, 3.45, 20_480, 0, 62.81),
    ("qwen3.6-35b-a3b", (10, 0, 30, 0), 34.66, 3.45, 20_480, 0, 62.81),
    ("qwen3.5-122b-a10b", (12, 0, 36, 0), 122.11, 9.77, 24_576, 0, 149.06),
    ("qwen3.5-397b-a17b", (15, 0, 45, 0), 396.35, 17.35, 30_720, 0, 186.33),
    ("gpt-oss-20b", (12, 12, 0, 0), 20.91, 4.19, 24_576, 24_576, 0),
    ("gpt-oss-120b", (18, 18, 0, 0), 116.79, 5.71, 36_864, 36_864, 0),
    ("gemma-4-26b-a4b", (5, 25, 0, 0), 25.2, 3.8, 20_480, 204_800, 0),
    ("gemma-4-31b", (10, 50, 0, 0), 30.7, 30.7, 81_920, 819_200, 0),
    ("mixtral-8x7b", (32, 0, 0, 0), 46.70, 12.88, 131_072, 0, 0),
    ("mistral-nemo-12b", (40, 0, 0, 0), 12.25, 12.25, 163_840, 0, 0),
    ("deepseek-v2-lite", (0, 0, 0, 27), 15.7, None, 31_104, 0, 0),
    ("deepseek-v3", (0, 0, 0, 61), 671.03, 37.55, 70_272, 0, 0),
    ("deepseek-r1", (0, 0, 0, 61), 671.03, 37.55, 70_272, 0, 0),
    ("kimi-k2", (0, 0, 0, 61), 1026.4, 32.9, 70_272, 0, 0),
    ("kimi-k2.5", (0, 0, 0, 61), 1026.4, 32.9, 70_272, 0, 0),
    ("minimax-m2.5", (62, 0, 0, 0), 228.7, 11.0, 253_952, 0, 0),
    ("minimax-m2.7", (62, 0, 0, 0), 228.7, 11.0, 253_952, 0, 0),
]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def load(tmp_path):
    """Write a configuration as a config.json of the folder `some-model`, and load it."""

    def write_and_load(config) -> ModelSpec:
        path = tmp_path / "some-model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        return load_model(str(path))

    return write_and_load


@pytest.mark.parametrize(("name", "layers", "total", "active", "per_token", "in_window", "state"), PUBLISHED)
def test_presets_reproduce_published_sizes(name, layers, total, active, per_token, in_window, state):
    model = load_model(name)
    assert (model.full_layers, model.sliding_layers, model.linear_layers, model.mla_layers) == layers
    assert model.total_params / 1e9 == pytest.approx(total, rel=0.005, abs=0.005)
    if active is not None:
        # two printed digits go no further than 0.6 %
        assert model.active_params / 1e9 == pytest.approx(active, rel=0.006, abs=0.005)
    assert model.kv_bytes_per_token() == per_token
    assert 2 * model.window_kv_elements_per_token() == in_window
    assert model.state_bytes_per_sequence() / MIB == pytest.approx(state, abs=0.005)


def test_every_preset_is_in_the_published_table():
    assert preset_names() == [row[0] for row in PUBLISHED]


@pytest.mark.parametrize("name", preset_names())
def test_parts_add_up_in_every_preset(name):
    model = load_model(name)
    routed = model.moe_layers * model.experts * model.expert_params
    head = 0 if model.tied else model.lm_head_params
    assert model.total_params == model.dense_params + routed + model.embedding_params + head
    assert model.weights_bytes("bf16").total == 2 * model.total_params
    assert (model.active_params < model.total_params) == bool(model.moe_layers)
    assert model.native_context_tokens <= model.max_context_tokens


def test_qwen3_8b_reaches_131072_tokens_with_yarn():
    model = load_model("qwen3-8b")
    assert (model.native_context_tokens, model.max_context_tokens) == (40_960, 131_072)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_group_splits_heads_state_and_weights_evenly(tp):
    for name in ("qwen3-32b", "gpt-oss-20b", "qwen3.5-122b-a10b"):
        model = load_model(name)
        if tp <= model.kv_heads:
            assert tp * model.kv_elements_per_token(tp) == model.kv_elements_per_token()
        assert tp * model.window_kv_elements_per_token(tp) == model.window_kv_elements_per_token()
        assert tp * model.state_bytes_per_sequence(tp) == model.state_bytes_per_sequence()
        assert tp * model.attention_flops_per_pair(tp) == model.attention_flops_per_pair()
        assert 0 <= tp * model.weights_bytes("w4a16", tp).total - model.weights_bytes("w4a16").total < 4 * tp


def test_fewer_heads_than_gpus_means_one_head_on_each():
    model = load_model("qwen3.5-35b-a3b")  # 2 KV heads
    assert model.kv_elements_per_token(8) == model.kv_elements_per_token(2)


def test_the_latent_of_mla_is_on_every_gpu():
    model = load_model("deepseek-v3")
    assert model.kv_elements_per_token(8) == model.kv_elements_per_token() == 61 * (512 + 64)


@pytest.mark.parametrize(("name", "tp"), [("qwen3-8b", 3), ("qwen3-8b", 0), ("qwen3.5-27b", 3)])
def test_heads_that_do_not_split_are_refused(name, tp):
    with pytest.raises(ConfigError, match="--tp must divide"):
        load_model(name).kv_elements_per_token(tp)


def test_pool_of_four_gpus_holds_four_times_the_tokens():
    """An engine's log shows 834,048 tokens on four GPUs beside 208,384 unsharded, 4.002 times."""
    model = load_model("qwen3-32b")
    ratio = model.kv_bytes_per_token() / model.kv_bytes_per_token(tp=4)
    assert ratio == pytest.approx(834_048 / 208_384, rel=0.001)


def test_int8_with_a_scale_per_head_and_token():
    """FP32 scale per 128 elements: 14,000.0 MB become 7,218.8 MB (nano-vllm#184)."""
    model = load_model("qwen3-8b")
    bits = 8 + 32 / model.head_dim
    assert 14_000 * model.kv_bytes_per_token(bits) / model.kv_bytes_per_token() == pytest.approx(7218.75)


def test_sliding_windows_have_a_least_and_a_reserved_size():
    """gpt-oss-20b, 32 sequences of 8,192 tokens: 6.09 GiB windowed, 12.00 GiB with whole layers (hf-mem#60)."""
    minimum, reserved = load_model("gpt-oss-20b").kv_bytes_bounds(8192)
    assert 32 * minimum / 2**30 == pytest.approx(6.094, abs=0.0005)
    assert 32 * reserved / 2**30 == 12.0
    assert (
        load_model("gpt-oss-20b").kv_bytes_bounds(128)[0] == load_model("gpt-oss-20b").kv_bytes_bounds(128)[1]
    )


def test_weight_formats():
    """61.03 GiB of Qwen3-32B in BF16 and 33.88 GiB of Llama-3.3-70B in FP8 on two GPUs: vLLM logs on H100."""
    assert load_model("qwen3-32b").weights_bytes("bf16").total / 2**30 == pytest.approx(61.03, rel=0.001)
    assert load_model("llama-3.1-70b").weights_bytes("fp8", 2).total / 2**30 == pytest.approx(
        33.88, rel=0.003
    )
    model = load_model("llama-3.1-8b")
    assert model.weights_bytes("w4a16").dense == model.dense_params * 4.25 / 8
    assert model.weights_bytes("w4a16").embedding == model.weights_bytes("bf16").embedding
    with pytest.raises(ConfigError, match="--weights must be one of bf16, fp8, w4a16, w4a16-mlp, got"):
        model.weights_bytes("int3")


@pytest.mark.parametrize(
    ("name", "left_out_gb", "loaded_gb"),
    [("qwen3.6-27b", 0.9, 27.51 * 2**30 / 1e9), ("qwen3.6-35b-a3b", 2.6, 24.4)],
)
def test_four_bits_in_mlps_and_experts_alone(name, left_out_gb, loaded_gb):
    """GPTQ checkpoints that leave attention and shared experts in BF16: raydelossantos/Qwen3.6-27B-GPTQ-Int4 takes
    27.51 GiB in vLLM, palmfuture/Qwen3.6-35B-A3B-GPTQ-Int4 24.4 GB on disk. Both hold a vision encoder (about
    0.46e9 parameters in BF16), the second also an MTP layer (0.84e9), which ModelSpec does not count.
    """
    model = load_model(name)
    total_gb = model.weights_bytes("w4a16-mlp").total / 1e9
    assert total_gb < loaded_gb
    assert total_gb + left_out_gb == pytest.approx(loaded_gb, rel=0.02)
    assert model.weights_bytes("w4a16").total < model.weights_bytes("w4a16-mlp").total
    kept_params = model.dense_params - model.mlp_params
    assert model.weights_bytes("w4a16-mlp").dense == 2 * kept_params + model.mlp_params * 4.25 / 8


def test_a_tied_head_is_read_by_a_step_but_stored_once():
    weights = load_model("qwen3-0.6b").weights_bytes("bf16")
    assert weights.lm_head == weights.embedding > 0
    assert weights.total == weights.dense + weights.embedding


def test_attention_flops_of_a_pair():
    dense = load_model("llama-3.1-8b")
    assert dense.attention_flops_per_pair() == 32 * 4 * 32 * 128
    assert load_model("gpt-oss-20b").sliding_attention_flops_per_pair() == 12 * 4 * 64 * 64
    assert load_model("deepseek-v3").attention_flops_per_pair() == 61 * 2 * 128 * (576 + 512)


def test_a_config_file_gives_the_preset(load):
    config = LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    model, preset = load(config), load_model("Llama-3.1-8B")
    assert model.name == "some-model"
    assert model.total_params == preset.total_params
    assert model.kv_bytes_per_token() == preset.kv_bytes_per_token()


def test_assumed_defaults_are_in_the_source(load):
    model = load(LLAMA)
    assert model.head_dim == 64
    assert "assumed: head_dim = 64 (hidden_size / num_attention_heads)" in model.source
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert "num_key_value_heads = 8" in load(config).source


def test_nested_text_config(load):
    """Mistral-Small-3.2-24B: 163,840 B per token; an engine's 28.20 GiB for 184,832 tokens agree to 0.02 %."""
    text = LLAMA | {"model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120, "head_dim": 128}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    model = load({"model_type": "mistral3", "text_config": text})
    assert model.kv_bytes_per_token() == 163_840
    assert model.kv_bytes_per_token() == pytest.approx(28.20 * 2**30 / 184_832, rel=2e-4)


@pytest.mark.parametrize(
    (
        "layers",
        "full",
        "q_heads",
        "kv_heads",
        "head_dim",
        "hidden",
        "inter",
        "per_token",
        "in_window",
        "total",
    ),
    [
        (62, 10, 32, 16, 128, 5376, 21504, 81_920, 425_984, 27.01),
        (48, 8, 16, 8, 256, 3840, 15360, 65_536, 327_680, None),
        (34, 5, 8, 4, 256, 2560, 10240, 20_480, 118_784, None),
    ],
)
def test_gemma_3(load, layers, full, q_heads, kv_heads, head_dim, hidden, inter, per_token, in_window, total):
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "vocab_size": 262_208,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
    }
    model = load({"model_type": "gemma3", "text_config": text})
    assert (model.full_layers, model.sliding_layers) == (full, layers - full)
    assert model.tied
    assert model.kv_bytes_per_token() == per_token
    assert 2 * model.window_kv_elements_per_token() == in_window
    if total:
        assert model.total_params / 1e9 == pytest.approx(total, rel=0.001)


def test_qwen3_next_and_its_state(load):
    """Qwen3-Next-80B-A3B: 79.67B parameters, 3.87B active, 24,576 B per token, 75.38 MiB per sequence."""
    config = LLAMA | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size": 2048,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 151_936,
    }
    model = load(config)
    assert model.total_params / 1e9 == pytest.approx(79.67, rel=0.001)
    assert model.active_params / 1e9 == pytest.approx(3.87, rel=0.003)
    assert model.kv_bytes_per_token() == 24_576
    assert model.state_bytes_per_sequence() / MIB == pytest.approx(75.38, abs=0.005)
    assert "full_attention_interval = 4" in model.source


def test_dense_layers_before_the_experts(load):
    """GLM-4.5-Air: 46 layers, one of them dense, 128 experts and a shared one: 106.9B, 188,416 B per token."""
    config = LLAMA | {
        "model_type": "glm4_moe",
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "vocab_size": 151_552,
    }
    model = load(config)
    assert model.moe_layers == 45
    assert model.total_params / 1e9 == pytest.approx(106.9, rel=0.001)
    assert model.kv_bytes_per_token() == 188_416


@pytest.mark.parametrize(
    ("field", "value", "sliding"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096, 2),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 0, 0),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            64,
            1,
        ),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
    ],
)
def test_where_a_window_counts(load, field, value, sliding):
    model = load(LLAMA | field)
    assert (model.window_tokens, model.sliding_layers) == (value, sliding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "512"}, "field hidden_size must be a whole number from 1 to .*, got '512'"),
        ({"hidden_size": float("nan")}, "field hidden_size must be .*, got nan"),
        ({"hidden_size": -512}, "field hidden_size must be .*, got -512"),
        ({"hidden_size": True}, "field hidden_size must be .*, got True"),
        ({"hidden_size": 10**400}, "field hidden_size must be"),
        ({"num_hidden_layers": 0}, "field num_hidden_layers must be .*, got 0"),
        ({"num_key_value_heads": 3}, "field num_key_value_heads must divide num_attention_heads = 8, got 3"),
        ({"hidden_size": 500}, "field head_dim is missing and hidden_size = 500"),
        ({"tie_word_embeddings": "no"}, "field tie_word_embeddings must be true or false, got 'no'"),
        ({"layer_types": ["full_attention"]}, "field layer_types must list 2 layers, got 1"),
        ({"layer_types": "full"}, "field layer_types must list 2 layers, got 'full'"),
        (
            {"layer_types": ["full_attention", "chunked"]},
            r"layer_types\[1\] must be one of .*, got 'chunked'",
        ),
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of the known architectures: .*llama"),
        ({"model_type": ["llama"]}, "model_type .* is not one of the known architectures"),
        ({"text_config": 5}, "field text_config must be an object, got 5"),
        ({"num_kv_shared_layers": 1}, "field num_kv_shared_layers must be 0"),
        ({"model_type": "mixtral"}, "field num_local_experts is missing; mixtral needs it"),
        ({"model_type": "gpt_oss"}, "field layer_types is missing; gpt_oss needs it"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "field num_experts_per_tok must not exceed num_local_experts = 2, got 3",
        ),
    ],
)
def test_bad_fields_are_named_with_file_and_value(load, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(LLAMA | change)
    assert "config.json: " in str(caught.value)


@pytest.mark.parametrize("name", LLAMA.keys() - {"num_key_value_heads", "tie_word_embeddings"})
def test_missing_fields_are_named(load, name):
    with pytest.raises(ConfigError, match=rf"config\.json: .*{name}"):
        load({key: value for key, value in LLAMA.items() if key != name})


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", "null", "[" * 100_000, '{"hidden_size": }'])
def test_a_file_that_is_no_json_object(load, text):
    with pytest.raises(ConfigError, match=r"config\.json: (not a JSON file|must hold one JSON object)"):
        load(text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_model(str(tmp_path / "config.json"))


def test_an_unknown_name_has_close_matches():
    with pytest.raises(
        ConfigError, match=r"unknown model 'qwen3-9b'; did you mean qwen3-8b.*kvfold list models"
    ):
        load_model("qwen3-9b")
    with pytest.raises(ConfigError, match="unknown model 'zzz'; give a preset or a path"):
        load_model("zzz")
