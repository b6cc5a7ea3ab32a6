"""The table that the simulator reads: what it says, that it can be measured again, and what it refuses."""

import csv
import subprocess
import sys

import pytest

from kvfold.codec.sizes import COLUMNS, SIZES_CSV, FormatSizes, load_sizes


def test_bundled_sizes():
    sizes = load_sizes()
    assert list(sizes) == ["bf16", "gaac"]
    bf16, gaac = sizes["bf16"], sizes["gaac"]
    assert (bf16.encoded_bits, bf16.slot_bits, bf16.raw_block_share, bf16.resident_saving) == (16, 16, 0, 0)
    assert bf16.decode_int_ops_per_element == 0
    assert (bf16.block_tokens, gaac.block_tokens) == (16, 64)
    assert 16 / gaac.encoded_bits == pytest.approx(1.405, rel=0.005)
    assert gaac.encoded_bits < gaac.slot_bits < 16
    assert gaac.resident_saving == pytest.approx(0.276, abs=0.002)
    assert gaac.origin == "measured"


def test_resident_bits_weigh_slots_and_raw_blocks():
    sizes = FormatSizes("x", 64, 11.0, 12.0, 0.25, 0.0, 0.0, "by hand", "modelled")
    assert sizes.resident_bits == 0.75 * 12 + 0.25 * 16
    assert sizes.resident_saving == 1 - 13 / 16


def test_reading_sizes_imports_no_numba_numpy_or_pandas():
    code = (
        "import sys; from kvfold.codec.sizes import load_sizes; load_sizes();"
        "sys.exit(','.join({'numba', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""


def test_table_is_what_the_real_tensors_give(shared_data):
    from kvfold.codec.survey import survey

    with SIZES_CSV.open(newline="") as file:
        committed = list(csv.DictReader(file))
    measured = survey(shared_data / "kv")
    assert len(measured) == len(committed)
    for new, old in zip(measured, committed, strict=True):
        # Rotated keys are rounded once more, so the last digits may depend on the machine's sine.
        assert float(new.pop("bits_per_element")) == pytest.approx(
            float(old.pop("bits_per_element")), abs=2e-3
        )
        assert new == old


def write_table(path, rows, columns=COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def row(kind, quantile, bits, raw="", format="gaac", block="64"):
    return (format, block, kind, "test", quantile, bits, raw)


def test_kinds_and_sources_weigh_the_same_and_resident_bits_stay_exact(tmp_path):
    rows = [row("k", "mean", 11), row("k", "slot", 12, 0.5), row("v", "mean", 12), row("v", "slot", 13, 0)]
    sizes = load_sizes(write_table(tmp_path / "sizes.csv", rows))["gaac"]
    assert sizes.encoded_bits == 11.5
    assert sizes.raw_block_share == 0.25
    assert sizes.resident_bits == pytest.approx(((0.5 * 12 + 0.5 * 16) + 13) / 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("k", "mean", "eleven")], "sizes.csv:2: could not convert string to float: 'eleven'"),
        ([row("k", "mean", 11, format="gaak")], "sizes.csv:2: format must be one of bf16, gaac, got 'gaak'"),
        ([row("k", "mean", 11), row("k", "slot", 12, 0)], r"kinds \['k'\]"),
        ([row("k", "mean", 11), row("v", "mean", 12), row("v", "slot", 12, 0)], "2 mean rows, 1 slot rows"),
    ],
)
def test_bad_tables_are_refused_with_their_place(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_sizes(write_table(tmp_path / "sizes.csv", rows))


def test_other_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sizes.csv:1: columns must be .* got format,bits"):
        load_sizes(write_table(tmp_path / "sizes.csv", [], ("format", "bits")))
