"""The table that the simulator reads: what it says, that it can be measured again, and what it refuses."""

import csv
import subprocess
import sys

import pytest

from kvfold.codec.formats import FORMATS
from kvfold.codec.sizes import COLUMNS, DECODE_COSTS, SIZES_CSV, FormatSizes, load_sizes
from kvfold.codec.survey import EXPECTED_COLUMNS, EXPECTED_CSV, expected_ratios, survey


def test_bundled_sizes():
    sizes = load_sizes()
    assert [name for name in sizes if not name.startswith("fp8-")] == list(FORMATS)
    bf16, gaac = sizes["bf16"], sizes["gaac"]
    assert (bf16.encoded_bits, bf16.slot_bits, bf16.raw_block_share, bf16.resident_saving) == (16, 16, 0, 0)
    assert bf16.decode_int_ops_per_element == 0
    assert (bf16.block_tokens, gaac.block_tokens) == (16, 64)
    assert 16 / gaac.encoded_bits == pytest.approx(1.405, rel=0.005)
    assert gaac.encoded_bits < gaac.slot_bits < 16
    assert gaac.resident_saving == pytest.approx(0.276, abs=0.002)
    assert gaac.origin == "measured"


def test_every_format_has_sizes_and_says_how_its_decoding_is_known():
    sizes = load_sizes()
    casts = ["fp8-e4m3", "fp8-e5m2"]
    assert [name for name in DECODE_COSTS if name not in casts] == list(FORMATS)
    assert [name for name, row in sizes.items() if not row.lossless] == casts
    assert [name for name, row in sizes.items() if not row.packed] == ["bf16", *casts]
    for name, row in sizes.items():
        assert row.block_tokens == (16 if name in casts else FORMATS[name].block_tokens)
        assert row.encoded_bits <= row.slot_bits
        assert row.source.endswith(DECODE_COSTS[name].basis)
    assert [name for name, row in sizes.items() if row.decode_overlap > 0] == ["fixed4", "fixed3"]
    # The order of saving is the order of decoding cost, but for tags, which cost less and save more than GAAC.
    assert sizes["fixed4"].resident_saving == pytest.approx(0.2455, abs=1e-3)
    assert sizes["fixed3"].resident_saving >= 0.295
    assert sizes["esc3"].resident_saving >= 0.30
    assert sizes["esc2-2"].resident_saving >= 0.325
    assert sizes["tag32"].resident_saving > sizes["tag8"].resident_saving > sizes["gaac"].resident_saving


def test_expected_ratios_are_what_the_real_tensors_give(shared_data):
    with EXPECTED_CSV.open(newline="") as file:
        committed = list(csv.DictReader(file))
    measured = expected_ratios(shared_data / "kv")
    assert len(measured) == len(committed)
    numbers = EXPECTED_COLUMNS[5:]
    for new, old in zip(measured, committed, strict=True):
        for column in numbers:
            now, then = new.pop(column), old.pop(column)
            assert (now == "") == (then == "")
            if now:
                # As above; a page at the edge of its slot may fall on either side of it.
                wide = column in ("slotted_saving", "raw_block_share")
                assert float(now) == pytest.approx(float(then), abs=0.05 if wide else 2e-3), (new, column)
        assert new == old


def test_expected_ratios_keep_what_was_promised():
    """CODEC.md's figures are means over 30 layers and four texts; these samples may lie up to 1.5 % lower."""
    with EXPECTED_CSV.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "code at 6144" in row["source"]]

    def bits(name, rotated):
        kinds = {("k", rotated), ("v", "no")}
        chosen = [
            row
            for row in rows
            if row["format"] == name and (row["kind"], row["rotated_calibration"]) in kinds
        ]
        assert len(chosen) == 2
        return chosen

    for name, ratio in (
        ("esc3", 1.440),
        ("esc2-2", 1.496),
        ("tag8", 1.424),
        ("tag32", 1.434),
        ("fixed4", 1.32),
    ):
        mean = 2 / sum(1 / float(row["encoded_ratio"]) for row in bits(name, "yes"))
        assert mean >= ratio * (1 if name == "fixed4" else 0.985)
    for name, saving in (("esc3", 0.300), ("esc2-2", 0.325)):
        assert all(float(row["pooled_saving"]) >= saving for row in bits(name, "yes"))
    gaac = {rotated: float(bits("gaac", rotated)[0]["encoded_ratio"]) for rotated in ("yes", "no")}
    assert gaac["yes"] == pytest.approx(1.4096, rel=0.005)
    assert gaac["no"] == pytest.approx(1.396, rel=0.005)


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
        (
            [row("k", "mean", 11, format="gaak")],
            "sizes.csv:2: format must be one of bf16, .*gaac, .* got 'gaak'",
        ),
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
