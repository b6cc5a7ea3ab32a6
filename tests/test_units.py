"""Units of the pool: sums that are exact however they are asked for, and the sizes that were measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.codec.sizes import CHUNKED, load_sizes
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.units import DRAWS, Units, draw_units

SIZES = load_sizes()
MODEL, GPU = load_model("llama-3.1-8b"), load_gpu("h200")
RING = np.random.default_rng(3).integers(50, 200, DRAWS)
DRAWN = Units(64, True, 125, 250, int(RING.max()), (0, *np.cumsum(RING).tolist()))


def units_of(sizes, model=MODEL, seed=0, tp=1):
    return draw_units(model, sizes, tp, kv_budget(model, GPU, sizes, kv_budget_bytes=2**34, tp=tp), seed)


@given(key=st.integers(0, 2**40), first=st.integers(0, 3 * DRAWS), length=st.integers(0, 3 * DRAWS))
def test_a_run_is_the_sum_of_its_units(key, first, length):
    last, middle = first + length, first + length // 3
    whole = DRAWN.run_bytes(key, first, last)
    assert whole == DRAWN.run_bytes(key, first, middle) + DRAWN.run_bytes(key, middle, last)
    one = [DRAWN.run_bytes(key, unit, unit + 1) for unit in range(first, min(last, first + 5))]
    assert all(50 <= size < 200 for size in one)
    assert sum(one) == DRAWN.run_bytes(key, first, first + len(one))


@given(key=st.integers(0, 2**40), last=st.integers(0, 3 * DRAWS), asked=st.integers(1, 10**6))
def test_a_cut_is_the_shortest_run_of_so_many_bytes(key, last, asked):
    for units in (DRAWN, replace(DRAWN, sums=())):
        first = units.cut(key, last, asked)
        assert units.run_bytes(key, first, last) >= asked > units.run_bytes(key, first + 1, last)


def test_chunked_formats_are_those_of_the_codec():
    formats = pytest.importorskip("kvfold.codec.formats").FORMATS
    assert set(CHUNKED) == {name for name, each in formats.items() if each.main_bytes is not None}


@pytest.mark.parametrize("name", sorted(set(SIZES) - set(CHUNKED)))
def test_units_of_one_slot_are_equal(name):
    units = units_of(SIZES[name])
    assert not units.drawn
    assert units.run_bytes(7, 3, 13) == 10 * units.mean_bytes


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3.5-35b-a3b"])
def test_drawn_units_have_the_measured_mean_and_little_spread(name, model):
    """64 blocks make a unit of the dense model, 20 one of the hybrid: what is left of the spread of a block."""
    units = units_of(SIZES[name], load_model(model))
    sizes = np.diff(units.sums)
    assert sizes.mean() == pytest.approx(units.mean_bytes, rel=3e-4)
    assert 2e-5 < sizes.std() / sizes.mean() < 2e-3
    assert units.largest_bytes == sizes.max() < units.raw_bytes


def test_raw_blocks_are_drawn_with_their_share():
    blocks = tuple(replace(block, raw_block_share=0.25) for block in SIZES["gaac"].blocks)
    sizes = replace(SIZES["gaac"], raw_block_share=0.25, blocks=blocks)
    units = units_of(sizes)
    drawn = np.diff(units.sums)
    assert drawn.mean() == pytest.approx(units.mean_bytes, rel=2e-3)
    slot, raw = SIZES["gaac"].slot_bits, 16.0
    # a binomial number of 64 blocks is raw
    assert drawn.std() / drawn.mean() == pytest.approx(
        (raw - slot) * np.sqrt(0.25 * 0.75 / 64) / sizes.resident_bits, rel=0.05
    )


def test_a_seed_is_a_draw_of_its_own():
    first, again, other = (units_of(SIZES["esc3"], seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.sums != other.sums


def test_mla_latents_are_drawn_too():
    model = load_model("deepseek-v3")
    budget = replace(
        kv_budget(MODEL, GPU, SIZES["esc3"], kv_budget_bytes=2**34),
        unit_bytes=round(SIZES["esc3"].resident_bits * model.kv_elements_per_token() * 8),
    )
    units = draw_units(model, SIZES["esc3"], 1, budget, 0)
    assert np.diff(units.sums).mean() == pytest.approx(units.mean_bytes, rel=1e-3)
