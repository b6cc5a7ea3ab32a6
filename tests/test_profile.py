"""A profile's tables: exact on the grid, linear between its points, marked outside of it."""

import pytest

from kvfold.sim.errors import ConfigError
from kvfold.sim.profile import blend, load_profile
from tests.engine_runs import CHUNKS, CONTEXTS, COUNTS, PAIR_US, even_us, make_profile, write_csv


@pytest.fixture
def profile(tmp_path):
    return load_profile(make_profile(tmp_path))


@pytest.mark.parametrize("count", [*COUNTS, 7, 100])
@pytest.mark.parametrize("context", [*CONTEXTS, 333, 9000])
def test_decode_attention_is_linear_in_kv_tokens(profile, count, context):
    line, inside = profile.attention.decode(count, context)
    assert line.base + line.slope * context == pytest.approx(even_us(count, context))
    assert inside


@pytest.mark.parametrize(("count", "context"), [(300, 1024), (4, 20_000), (4, 8)])
def test_outside_of_the_grid_the_line_goes_on_and_is_marked(profile, count, context):
    line, inside = profile.attention.decode(count, context)
    assert line.base + line.slope * context == pytest.approx(even_us(count, context))
    assert not inside


@pytest.mark.parametrize("chunk", [*CHUNKS, 700, 1999])
@pytest.mark.parametrize("past", [0, 500, 8192])
def test_mixed_attention_follows_the_pairs_of_the_chunk(profile, chunk, past):
    """The square of the chunk, not its length, is what its own pairs follow; its history enters linearly."""
    found, inside = profile.attention.mixed_us(chunk, 0, 4, 1024)
    assert found == pytest.approx(5 + PAIR_US * chunk * chunk / 2 + even_us(4, 1024))
    assert inside
    if chunk in CHUNKS:
        found, _ = profile.attention.mixed_us(chunk, past, 0, 0)
        assert found == pytest.approx(5 + PAIR_US * (chunk * chunk / 2 + chunk * past))


def test_times_of_uneven_batches_are_sums_over_repeats(profile):
    """The file's times are three times those of attention.csv, which only its even batches tell."""
    assert profile.uneven.us([1024] + [256] * 15, 0) == pytest.approx(0.01 * 768)
    assert profile.uneven.us([1024] * 8 + [256] * 8, 0) == pytest.approx(0.01 / 8 * 768)


def test_uneven_batches_of_many_lengths_add_up_over_their_gaps(profile):
    first, second = profile.uneven.us([1024] + [256] * 15, 0), profile.uneven.us([256] * 8 + [0] * 8, 0)
    assert profile.uneven.us([1024] + [256] * 7 + [0] * 8, 0) == pytest.approx(first + second)
    assert profile.uneven.us([500] * 16, 0) == 0
    assert profile.uneven.us([500], 0) == 0


def test_the_correction_follows_the_profiles_own_word(tmp_path):
    assert load_profile(make_profile(tmp_path, skew=False)).uneven is None


def test_the_tensor_parallel_size_is_in_the_name(tmp_path):
    """meta.json names the engine of the first sweep, which had one GPU."""
    assert load_profile(make_profile(tmp_path, tp=2)).tp == 2


def test_experts_are_a_table_of_tokens_and_experts(tmp_path):
    profile = load_profile(make_profile(tmp_path, moe=True))
    assert profile.moe[64].at(64) == pytest.approx(5 + 0.02 * 64 + 0.5 * 64)


def test_blend_goes_on_beyond_the_last_point():
    assert blend([1, 2, 4], 3) == [(2, 0.5), (4, 0.5)]
    assert blend([1, 2, 4], 8) == [(2, -2.0), (4, 3.0)]
    assert blend([1, 2, 4], 0) == [(1, 1.0)]


@pytest.mark.parametrize(
    ("name", "columns", "row", "said"),
    [
        ("dense.csv", "layer,tokens,time_us", ("qkv_proj", "x", "1"), "dense.csv:2"),
        ("dense.csv", "layer,tokens,time_us", ("qkv_proj", "1", "-1"), "above 0"),
        ("attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode", (0, 0, 1, 16), "attention.csv:2"),
        ("per_sequence.csv", "layer,sequences,time_us", ("sampler", "1", "1"), "lm_head"),
        (
            "skew.csv",
            "n,nb,skew,pc,kvs,kv_big,t_mean_us,t_max_us,t_skew_us",
            (3, 1, 4, 0, 1, 7, 1, 1, 1),
            "scale",
        ),
    ],
)
def test_a_bad_table_is_one_line_with_its_place(tmp_path, name, columns, row, said):
    path = make_profile(tmp_path)
    write_csv(path / name, columns.split(","), [row])
    with pytest.raises(ConfigError, match=said):
        load_profile(path)


def test_a_missing_table_is_named(tmp_path):
    path = make_profile(tmp_path)
    (path / "dense.csv").unlink()
    with pytest.raises(ConfigError, match=r"dense\.csv: cannot be read"):
        load_profile(path)


def test_real_profiles_load(shared_data):
    folder = shared_data / "validation" / "llmservingsim-vllm" / "profiles"
    plain = load_profile(folder / "RTX4090_meta-llama_Llama-3.1-8B_bf16_tp1")
    uneven = load_profile(folder / "RTXPRO6000_meta-llama_Llama-3.1-8B_bf16_tp1")
    assert plain.uneven is None
    # one long context among 128 costs about 12 ns per token that it is longer, and more than one among 256
    assert uneven.uneven.us([2048] + [1024] * 127, 0) / 1024 == pytest.approx(0.0121, rel=0.05)
    assert set(plain.dense) == set(uneven.dense)
