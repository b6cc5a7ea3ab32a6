"""`kvfold codec ratio`: its JSON, its table, its exit codes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from kvfold.analysis.cmd_codec import app
from kvfold.codec.cases import contents
from kvfold.codec.errors import BadArrayError
from kvfold.codec.formats import FORMATS
from kvfold.codec.names import known_names

KEYS = {
    *("encoded_ratio", "bits_per_element", "resident_saving", "entropy_bound_ratio"),
    *("mode_shares", "exception_share", "raw_block_share"),
}


def run(*arguments):
    return CliRunner().invoke(app, ["ratio", *map(str, arguments)])


@pytest.fixture
def arrays(tmp_path):
    """Two arrays of [2 heads, tokens, 16 channels] as files: 200 tokens to calibrate on, 150 to test."""
    rng = np.random.default_rng(1)
    whole = contents("normal", (2, 350, 16), rng)
    np.save(tmp_path / "calibration.npy", whole[:, :200])
    np.save(tmp_path / "test.npy", whole[:, 200:])
    return tmp_path / "calibration.npy", tmp_path / "test.npy"


def test_json_has_the_keys_of_the_contract(arrays):
    calibration, test = arrays
    result = run(test, "--calibrate-on", calibration, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) >= KEYS
    assert set(report["files"][0]) >= KEYS
    assert set(report["mode_shares"]) == {"3-bit", "4-bit", "raw"}
    assert report["encoded_ratio"] == pytest.approx(16 / report["bits_per_element"])
    assert report["raw_tail_share"] == pytest.approx(22 / 150)
    assert report["calibrated_on"] == [str(calibration)]
    assert report["files"][0]["in_sample"] is False
    assert report["worst_block"] == report["files"][0]["worst_block"]
    assert report["worst_block"]["bits_per_element"] >= report["bits_per_element"]
    assert result.stdout == run(test, "--calibrate-on", calibration, "--json").stdout


def test_without_calibration_each_file_is_its_own_and_the_output_says_so(arrays):
    report = json.loads(run(*arrays, "--json").stdout)
    assert report["calibrated_on"] == []
    assert [row["in_sample"] for row in report["files"]] == [True, True]
    elements = [row["blocks"] for row in report["files"]]
    mean = np.average([row["bits_per_element"] for row in report["files"]], weights=elements)
    assert report["bits_per_element"] == pytest.approx(mean)
    assert "each file itself (in-sample)" in " ".join(run(*arrays).stdout.split())


def test_table_shows_what_json_says(arrays):
    report = json.loads(run(*arrays, "--json").stdout)
    table = run(*arrays).stdout
    assert f"{report['encoded_ratio']:.4f}" in table
    assert f"{report['resident_saving']:.2%}" in table
    assert "measured" in table
    assert "By file" in table


def test_bf16_is_the_baseline(arrays):
    report = json.loads(run(arrays[0], "--format", "bf16", "--json").stdout)
    assert report["encoded_ratio"] == 1
    assert report["resident_saving"] == 0
    assert report["mode_shares"] == {}


def test_head_axis_and_block_tokens(arrays, tmp_path):
    patterns = np.load(arrays[0])
    np.save(tmp_path / "token_major.npy", patterns.swapaxes(0, 1))
    straight = json.loads(run(arrays[0], "--block-tokens", "32", "--json").stdout)
    moved = json.loads(
        run(tmp_path / "token_major.npy", "--head-axis", "1", "--block-tokens", 32, "--json").stdout
    )
    assert straight["bits_per_element"] == moved["bits_per_element"]
    assert straight["files"][0]["blocks"] == 6


def test_lost_bits_exit_6_and_show_the_first_five(arrays, monkeypatch):
    good = FORMATS["gaac"]

    def drop_the_sign_of_head_1(packed):
        patterns = good.decode(packed)
        patterns[1] &= 0x7FFF
        return patterns

    monkeypatch.setitem(FORMATS, "gaac", replace(good, decode=drop_the_sign_of_head_1))
    result = run(arrays[0], "--json")
    assert result.exit_code == 6
    assert result.stdout == ""
    lost = np.argwhere(np.load(arrays[0])[1] >> 15)
    assert f"{len(lost)} of 6400 values differ after gaac" in result.stderr
    assert result.stderr.count("->") == 5
    value = np.load(arrays[0])[1, *lost[0]]
    assert f"{[1, *lost[0].tolist()]} 0x{value:04x} -> 0x{value & 0x7FFF:04x}" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "zip"), "format must be one of bf16, gaac,"),
        (("--format", "gaac:group=5"), "group 4, 8, 16, 32"),
        (("--format", "fixed4", "--block-tokens", "24"), "must be a multiple of 16, got 24"),
        (("--calibrate-on", "x.npy", "--calibration", "y"), "excludes --calibrate-on"),
        (("--block-tokens", "0"), "Invalid value for '--block-tokens'"),
        (("--head-axis", "3"), "Invalid value for '--head-axis'"),
    ],
)
def test_usage_errors_exit_2(arrays, options, message):
    result = run(arrays[0], *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_every_format_is_measured_beside_its_bound(arrays):
    for name in known_names():
        report = json.loads(run(*arrays, "--format", name, "--block-tokens", "32", "--json").stdout)
        is_fp8 = "fp8" in name
        lossy = 2 if is_fp8 else 1
        assert report["encoded_ratio"] <= report["entropy_bound_ratio"]
        assert 0.95 * lossy < report["worst_block"]["ratio"] <= report["encoded_ratio"]
        assert (report["ratio_to_fp8"] is not None) == is_fp8
        has_lists = name.startswith(("fixed3", "esc", "tag"))
        assert (report["pooled_saving"] is not None) == has_lists
        if has_lists:
            assert 0 < report["pooled_saving"] < 1 - 1 / report["encoded_ratio"]
        assert report["resident_saving"] < 1 - 1 / report["encoded_ratio"] + 1e-9


def test_table_has_bound_worst_block_and_both_residences(arrays):
    table = run(*arrays, "--format", "esc3").stdout
    for row in ("bound of a static", "worst block's ratio", "saving, in slots", "saving, planes and chunks"):
        assert row in table
    table = run(arrays[0], "--format", "esc2-2+fp8-e5m2").stdout
    assert "as the cast left it" in " ".join(table.split())
    assert "encoded ratio, to FP8" in table


def test_parameters_are_part_of_the_name(arrays):
    def ratio(name):
        return json.loads(run(arrays[0], "--format", name, "--json").stdout)["encoded_ratio"]

    assert ratio("gaac:group=8,axis=channel") == ratio("gaac")
    assert ratio("gaac:group=16,axis=token") != ratio("gaac")
    assert ratio("fp8-e4m3:scale=amax") == ratio("fp8-e4m3") == 2


def test_fp8_arrays_are_packed_as_they_are(arrays, tmp_path):
    values = np.random.default_rng(2).integers(0, 256, (2, 128, 16), dtype=np.uint8)
    np.save(tmp_path / "fp8.npy", values)
    report = json.loads(run(tmp_path / "fp8.npy", "--format", "esc3+fp8-e5m2", "--json").stdout)
    assert report["mismatches"] == 0
    assert report["ratio_to_fp8"] == 1
    result = run(tmp_path / "fp8.npy", "--format", "gaac")
    assert result.exit_code == 2
    result = run(arrays[0], tmp_path / "fp8.npy", "--format", "fp8-e4m3")
    assert "dtype must be that of the other arrays, uint16, got uint8" in str(result.exception)


def save(path, shape):
    np.save(path, np.zeros(shape, np.uint16))
    return path


def test_arrays_that_do_not_fit_the_call_are_named(tmp_path):
    narrow = save(tmp_path / "narrow.npy", (2, 64, 12))
    short = save(tmp_path / "short.npy", (2, 63, 16))
    good = save(tmp_path / "good.npy", (2, 64, 16))
    wide = save(tmp_path / "wide.npy", (2, 64, 24))
    for arguments, message in (
        ((narrow,), f"{narrow}: head_dim must be a multiple of 8, got 12"),
        ((short,), f"{short}: must hold one full block of 64 tokens, got 63 tokens"),
        (
            (wide, "--calibrate-on", good),
            f"{wide}: kv_heads and head_dim must be those of the calibration, [2, 16]",
        ),
        (
            (good, "--calibrate-on", good, "--calibrate-on", wide),
            f"{wide}: kv_heads and head_dim must be those",
        ),
        ((tmp_path / "none.npy",), "none.npy: cannot be read"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, BadArrayError)
        assert message in str(result.exception)
        assert result.stdout == ""


def test_real_tensors(shared_data):
    folder = shared_data / "kv"
    for kind, ratio, misses in (("k", 1.396, 0.0246), ("v", 1.404, 0.0178)):
        result = run(
            folder / f"smollm2_135m_code_pos6144_L14_{kind}.npy",
            *("--calibrate-on", folder / f"smollm2_135m_prose_L14_{kind}.npy", "--json"),
        )
        report = json.loads(result.stdout)
        assert report["encoded_ratio"] == pytest.approx(ratio, rel=0.005)
        assert report["exception_share"] == pytest.approx(misses, abs=1e-4)
        assert report["encoded_ratio"] < report["entropy_bound_ratio"]
        assert 0.26 < report["resident_saving"] < 1 - 1 / report["encoded_ratio"]
