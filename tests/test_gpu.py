"""GPU profiles: published ratios, agreement with the public tables, and what a profile file may not hold."""

import json

import pytest

from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import COUNTS, EFFICIENCY, FIGURES, GpuSpec, load_gpu, preset_names, require

NAMES = ["h200", "h100", "a100-80g", "dgx-spark", "rtx-4090", "rtx-pro-6000", "m4", "m4-pro", "m4-max"]
MINIMAL = "memory_bytes = 1000\nbandwidth_bytes_per_s = 1e9\n"


@pytest.fixture
def load(tmp_path):
    """Write a GPU file `mine.toml` and load it."""

    def write_and_load(text: str) -> GpuSpec:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return load_gpu(str(path))

    return write_and_load


def test_presets():
    assert preset_names() == NAMES


@pytest.mark.parametrize(("name", "ops"), [("h200", 7), ("h100", 10), ("a100-80g", 10), ("rtx-4090", 41)])
def test_integer_operations_per_element(name, ops):
    """Estimates at full clock that were published with the kernel notes, to their last digit."""
    assert load_gpu(name).int_ops_per_bf16_element == pytest.approx(ops, abs=0.5)


def test_efficiency_is_one_figure_for_all():
    """0.80: the factor of the public tables, and what a BF16 GEMM reaches on an H200."""
    for name in NAMES:
        gpu = load_gpu(name)
        assert gpu.bandwidth_efficiency == gpu.compute_efficiency == EFFICIENCY
    measured_tflops, datasheet_tflops = 790, 989
    assert measured_tflops / datasheet_tflops == pytest.approx(EFFICIENCY, abs=0.005)


@pytest.mark.parametrize(
    ("name", "system"), [("h200", "h200_sxm"), ("h100", "h100_sxm"), ("a100-80g", "a100_sxm")]
)
def test_figures_agree_with_the_public_tables(shared_data, name, system):
    path = shared_data / "validation" / "aiconfigurator-perfdb" / f"{system}.json"
    nominal, gpu = json.loads(path.read_text()), load_gpu(name)
    assert gpu.bandwidth_bytes_per_s == nominal["gpu"]["mem_bw"]
    assert gpu.bf16_flops_per_s == nominal["gpu"]["bfloat16_tc_flops"]
    assert gpu.fp8_flops_per_s == nominal["gpu"].get("fp8_tc_flops")
    assert gpu.power_limit_w == nominal["gpu"]["power"]
    assert gpu.link_bytes_per_s == nominal["node"]["intra_node_bw"]
    assert gpu.host_link_bytes_per_s == nominal["node"]["pcie_bw"]
    assert gpu.bandwidth_efficiency == nominal["gpu"]["mem_bw_empirical_scaling_factor"]
    assert gpu.memory_bytes <= nominal["gpu"]["mem_capacity"] * 1.0001


def test_memory_of_the_rtx_4090_is_what_a_run_reports(shared_data):
    path = shared_data / "validation" / "llmservingsim-vllm" / "RTX4090_Llama-3.1-8B" / "meta.json"
    hardware = json.loads(path.read_text())["hardware"]
    assert load_gpu("rtx-4090").memory_bytes == hardware["device_total_memory_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_names_its_origin(name):
    gpu = load_gpu(name)
    for figure in FIGURES:
        origin = gpu.source(figure).split(":")[0]
        assert origin in ("measured", "published", "modelled"), (figure, origin)
    assert gpu.source("bandwidth_efficiency").startswith("modelled")
    assert set(gpu.sources) <= {*FIGURES, "all"}


def test_unknown_is_not_zero():
    gpu = load_gpu("m4")
    assert gpu.bf16_flops_per_s is None
    assert gpu.int_ops_per_bf16_element is None
    with pytest.raises(ConfigError, match=r"bf16_flops_per_s of GPU m4 is unknown; give it in a GPU file"):
        require(gpu, "bf16_flops_per_s")
    with pytest.raises(ConfigError, match="power_limit_w of GPU m4 is unknown"):
        require(gpu, "power_limit_w")
    assert require(load_gpu("h100"), "bf16_flops_per_s") == 989e12


def test_a_file_of_ones_own(load):
    gpu = load(
        MINIMAL + 'unchecked = ["memory_bytes"]\nsm_count = 4\n[sources]\nsm_count = "measured: counted"\n'
    )
    assert (gpu.name, gpu.memory_bytes, gpu.bandwidth_bytes_per_s, gpu.sm_count) == ("mine", 1000, 1e9, 4)
    assert gpu.unchecked == ("memory_bytes",)
    assert gpu.source("sm_count") == "measured: counted"
    assert gpu.source("memory_bytes") == "given: GPU file"
    assert gpu.clock_hz is None
    assert load('name = "yours"\n' + MINIMAL).name == "yours"


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", '"12"', "true", "[1]"])
def test_impossible_figures_are_named(load, figure, value):
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(figure)]
    with pytest.raises(ConfigError, match=rf"mine\.toml: field {figure} must be a positive number, got"):
        load("\n".join([*lines, f"{figure} = {value}"]))


@pytest.mark.parametrize("figure", COUNTS)
def test_counts_are_whole(load, figure):
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(figure)]
    with pytest.raises(ConfigError, match=rf"field {figure} must be a whole number, got 2\.5"):
        load("\n".join([*lines, f"{figure} = 2.5"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth_bytes_per_s = 1e9", "field memory_bytes is missing; add it"),
        ("memory_bytes = 1000", "field bandwidth_bytes_per_s is missing; add it"),
        (MINIMAL + "clock_khz = 1", "unknown field clock_khz; did you mean clock_hz"),
        (MINIMAL + "zzz = 1", "unknown field zzz; the fields are name, memory_bytes"),
        (MINIMAL + "compute_efficiency = 1.01", "field compute_efficiency must be at most 1, got 1.01"),
        (MINIMAL + "shared_memory = 1", "field shared_memory must be true or false, got 1"),
        (MINIMAL + 'unchecked = ["nothing"]', "field unchecked must be a list of field names"),
        (MINIMAL + "sources = 5", "field sources must be a table of texts, got 5"),
        (MINIMAL + "name = 5", "field name must be a text, got 5"),
        ("memory_bytes =", r"mine\.toml: not a TOML file"),
    ],
)
def test_bad_files(load, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_unknown_names(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown GPU 'h101'; did you mean h100\?"):
        load_gpu("h101")
    with pytest.raises(ConfigError, match="unknown GPU 'zzz'; give a preset or a path to a GPU file"):
        load_gpu("zzz")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_gpu(str(tmp_path / "none.toml"))
    assert load_gpu("H200") == load_gpu("h200")
