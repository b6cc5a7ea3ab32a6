"""`kvfold codec calibrate`, `pack`, `unpack` and `verify`: files in, files out, exit codes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from kvfold.analysis.cmd_codec import app
from kvfold.codec import container
from kvfold.codec.calibration import load
from kvfold.codec.cases import contents
from kvfold.codec.errors import BadArrayError, CorruptDataError
from kvfold.codec.formats import FORMATS
from kvfold.codec.names import find_fp8, known_names
from kvfold.codec.rope import Rope
from kvfold.codec.windows import calibrate, rotate_keys
from kvfold.sim.errors import ConfigError


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def array(tmp_path):
    """Keys of 2 heads, 200 tokens, 16 channels, as a file."""
    patterns = contents("normal", (2, 200, 16), np.random.default_rng(1))
    np.save(tmp_path / "k.npy", patterns)
    return tmp_path / "k.npy"


@pytest.mark.parametrize("name", [*known_names(), "gaac:group=16,axis=token", "fixed4:kind=v"])
def test_pack_and_unpack_give_the_file_back(array, tmp_path, name):
    packed, back = tmp_path / "k.kvf", tmp_path / "back.npy"
    options = ("--format", name, "--block-tokens", 32, "--kind", "k", "--out", packed, "--json")
    report = json.loads(run("pack", array, *options).stdout)
    assert report["bytes"] == packed.stat().st_size
    assert report["format"] == name
    about = json.loads(run("unpack", packed, "--out", back, "--json").stdout)
    assert (about["format"], about["kind"], about["block_tokens"], about["shape"]) == (
        name,
        "k",
        32,
        [2, 200, 16],
    )
    patterns = np.load(array)
    expected = find_fp8(name).cast(patterns) if "fp8" in name else patterns
    unpacked = np.load(back)
    assert unpacked.dtype == expected.dtype
    assert np.array_equal(unpacked, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.npy", "k.kvf", "k.npy"]


def test_fp8_unpacks_to_bytes_or_widened(array, tmp_path):
    run("pack", array, "--format", "fp8-e4m3:scale=0.5", "--out", tmp_path / "k.kvf")
    run("unpack", tmp_path / "k.kvf", "--out", tmp_path / "bytes.npy")
    run("unpack", tmp_path / "k.kvf", "--widen", "--out", tmp_path / "wide.npy")
    values, wide = np.load(tmp_path / "bytes.npy"), np.load(tmp_path / "wide.npy")
    assert values.dtype == np.uint8
    assert np.array_equal(wide, container.unpack((tmp_path / "k.kvf").read_bytes()))
    run("pack", tmp_path / "bytes.npy", "--format", "gaac+fp8-e4m3", "--out", tmp_path / "again.kvf")
    run("unpack", tmp_path / "again.kvf", "--out", tmp_path / "again.npy")
    assert np.array_equal(np.load(tmp_path / "again.npy"), values)


def test_pack_takes_windows_from_a_calibration(array, tmp_path):
    assert run("calibrate", array, "--kind", "k", "--out", tmp_path / "cal.json").exit_code == 0
    other = tmp_path / "other.npy"
    np.save(other, contents("uniform", (2, 70, 16), np.random.default_rng(2)))
    assert (
        run("pack", other, "--calibration", tmp_path / "cal.json", "--out", tmp_path / "o.kvf").exit_code == 0
    )
    windows = container.read((tmp_path / "o.kvf").read_bytes()).packed.windows
    assert np.array_equal(windows.narrow_base, calibrate([np.load(array)]).narrow_base)


def test_nothing_is_written_when_bits_are_lost(array, tmp_path, monkeypatch):
    good = FORMATS["esc3"]
    monkeypatch.setitem(FORMATS, "esc3", replace(good, decode=lambda packed: good.decode(packed) & 0x7FFF))
    result = run("pack", array, "--format", "esc3", "--out", tmp_path / "k.kvf")
    assert result.exit_code == 6
    assert "values differ after esc3" in result.stderr
    assert not (tmp_path / "k.kvf").exists()


def test_a_broken_container_names_file_and_byte_and_writes_nothing(array, tmp_path):
    packed = tmp_path / "k.kvf"
    run("pack", array, "--out", packed)
    data = bytearray(packed.read_bytes())
    data[-1] ^= 1
    packed.write_bytes(data)
    result = run("unpack", packed, "--out", tmp_path / "back.npy")
    assert isinstance(result.exception, CorruptDataError)
    assert str(result.exception).startswith(f"{packed}: byte ")
    assert not (tmp_path / "back.npy").exists()
    result = run("unpack", tmp_path / "none", "--out", tmp_path / "back.npy")
    assert "none: cannot be read" in str(result.exception)


def test_a_failed_write_leaves_nothing(array, tmp_path):
    (tmp_path / "folder").mkdir()
    for command in ("pack", "calibrate"):
        result = run(command, array, "--out", tmp_path / "folder" / "no" / "k.kvf")
        assert isinstance(result.exception, ConfigError)
        assert "k.kvf: cannot be written (No such file or directory); give another --out" in str(
            result.exception
        )
    assert list((tmp_path / "folder").iterdir()) == []


def test_sizes_that_a_format_does_not_take_are_named(tmp_path):
    np.save(tmp_path / "odd.npy", np.zeros((1, 40, 12), np.uint16))
    result = run("pack", tmp_path / "odd.npy", "--out", tmp_path / "o.kvf")
    assert isinstance(result.exception, BadArrayError)
    assert "odd.npy: head_dim must be a multiple of 8, got 12" in str(result.exception)


def test_calibrate_writes_windows_of_all_copies_and_slots(array, tmp_path):
    out = tmp_path / "cal.json"
    result = run(
        *("calibrate", array, "--layer", 14, "--kind", "k", "--rotate-to", 500, "--rope-theta", 1e4),
        *("--formats", "gaac,esc3,esc3+fp8-e4m3", "--block-tokens", 32),
        *("--out", out, "--json"),
    )
    report = json.loads(result.stdout)
    assert [row["cast"] for row in report["written"]] == ["", "fp8-e4m3"]
    bf16, fp8 = load(out.read_text())
    keys = np.load(array)
    copies = [keys, rotate_keys(keys, 200, 1e4), rotate_keys(keys, 300, 1e4)]
    assert np.array_equal(bf16.windows.narrow_base, calibrate(copies).narrow_base)
    assert bf16.rotated_by_tokens == (200, 300)
    assert (bf16.layer, bf16.kind, bf16.tokens) == (14, "k", 200)
    assert {slot.format_name for slot in bf16.slots} == {"gaac", "esc3"}
    assert fp8.slot_bytes("esc3+fp8-e4m3", 32) < bf16.slot_bytes("esc3", 32) * 0.7


def test_ratio_takes_windows_and_slot_from_the_file(array, tmp_path):
    out = tmp_path / "cal.json"
    run("calibrate", array, "--formats", "esc3,esc3+fp8-e4m3", "--out", out)
    for name in ("esc3", "esc3+fp8-e4m3"):
        direct = json.loads(run("ratio", array, "--format", name, "--calibrate-on", array, "--json").stdout)
        by_file = json.loads(run("ratio", array, "--format", name, "--calibration", out, "--json").stdout)
        assert by_file.pop("calibrated_on") == [str(out)]
        assert direct.pop("calibrated_on") == [str(array)]
        assert by_file["files"][0].pop("in_sample") is False
        assert direct["files"][0].pop("in_sample") is True
        assert by_file == direct
    result = run("ratio", array, "--format", "gaac", "--calibration", out)
    assert isinstance(result.exception, ConfigError)
    assert "has no slot of gaac in blocks of 64 tokens; calibrate with --formats gaac" in str(
        result.exception
    )
    np.save(tmp_path / "wide.npy", np.zeros((2, 64, 24), np.uint16))
    result = run("ratio", tmp_path / "wide.npy", "--format", "esc3", "--calibration", out)
    assert "is of [2, 16] heads and channels, got arrays of [2, 24]" in str(result.exception)


def test_tables_are_added_and_replaced_by_name(array, tmp_path):
    out = tmp_path / "cal.json"
    for options in (("--kind", "k"), ("--kind", "v"), ("--kind", "k", "--per", "layer")):
        assert run("calibrate", array, "--layer", 0, *options, "--add", "--out", out).exit_code == 0
    tables = load(out.read_text())
    assert [(table.kind, table.per) for table in tables] == [("k", "layer"), ("v", "channel")]
    result = run("ratio", array, "--calibration", out)
    assert isinstance(result.exception, ConfigError)
    assert "one table must be of any layer, k or v, bf16, got 2 of layer 0, k, bf16" in str(result.exception)
    assert run("ratio", array, "--calibration", out, "--kind", "v").exit_code == 0
    assert run("calibrate", array, "--layer", 0, "--out", out).exit_code == 0
    assert len(load(out.read_text())) == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 1e5}, Rope(1e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(5e5)),
        ({"text_config": {"rope_theta": 1e6, "rope_scaling": None}}, Rope(1e6)),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5, "head_dim": 128}, Rope(1e4, rotary_dim=64)),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "hidden_size": 512, "num_attention_heads": 8},
            Rope(1e4, rotary_dim=16),
        ),
    ],
)
def test_rope_of_a_config(config, expected):
    from kvfold.analysis.cmd_codec_calibrate import rope_of

    assert rope_of(config, "half", "config.json") == expected


def test_rope_that_depends_on_the_sequence_is_refused(array, tmp_path):
    config = tmp_path / "config.json"
    for text, message in (
        ('{"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn"}}', "got rope type 'yarn'"),
        ("{}", "field rope_theta must be a number above 1, got None"),
        ("no", "not a JSON file"),
    ):
        config.write_text(text)
        result = run(
            "calibrate", array, "--rotate-to", 500, "--rope-config", config, "--out", tmp_path / "c.json"
        )
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)
        assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rotate-to", "500"), "needs one of --rope-theta and --rope-config"),
        (("--rope-theta", "1e4"), "needs --rotate-to"),
        (("--rotate-to", "500", "--rope-theta", "1e4", "--kind", "v"), "values have no position"),
        (("--rotate-to", "500", "--rope-theta", "0.5"), "rope theta must be above 1, got 0.5"),
        (("--formats", "zip"), "format must be one of bf16"),
    ],
)
def test_usage_errors_of_calibrate(array, tmp_path, options, message):
    result = run("calibrate", array, *options, "--out", tmp_path / "c.json")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_arrays_that_cannot_be_calibrated_on(array, tmp_path):
    other = tmp_path / "other.npy"
    np.save(other, np.full((3, 64, 16), 0x7F80, np.uint16))
    result = run("calibrate", array, other, "--out", tmp_path / "c.json")
    assert isinstance(result.exception, BadArrayError)
    assert "must agree in kv_heads and head_dim, got [(2, 16), (3, 16)]" in str(result.exception)
    result = run("calibrate", other, "--rotate-to", 500, "--rope-theta", 1e4, "--out", tmp_path / "c.json")
    assert "keys to rotate must be finite" in str(result.exception)
    result = run("calibrate", array, "--rotate-to", 100, "--rope-theta", 1e4, "--out", tmp_path / "c.json")
    assert "at least 200 tokens, by steps of at least 1, got 100" in str(result.exception)
    assert not (tmp_path / "c.json").exists()


def test_broken_calibration_files_are_named(array, tmp_path):
    path = tmp_path / "cal.json"
    for data, kind, message in (
        (b"{", CorruptDataError, "byte 1: a calibration file must be JSON"),
        (b"\xff", CorruptDataError, "byte 0: a calibration file must be UTF-8"),
        (None, BadArrayError, "cannot be read"),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        result = run("ratio", array, "--calibration", path)
        assert isinstance(result.exception, kind)
        assert f"{path}: {message}" in str(result.exception)


def test_verify_counts_values_and_mutations():
    options = (
        "verify",
        "--values",
        "1e6",
        "--formats",
        "gaac:group=16,esc3",
        "--seed",
        5,
        "--mutations",
        101,
    )
    result = run(*options, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["mismatches"] == report["undetected_mutations"] == 0
    assert [row["format"] for row in report["formats"]] == ["gaac:group=16", "esc3"]
    assert report["values"] == sum(row["values"] for row in report["formats"]) > 2e6
    assert [row["mutations"] for row in report["formats"]] == [101, 101]
    assert "million a second" in result.stderr
    assert "Every bit comes back" in run("verify", "--values", 1, "--formats", "bf16").stdout


def test_verify_exits_6_on_a_lost_bit(monkeypatch):
    good = FORMATS["gaac"]
    monkeypatch.setitem(FORMATS, "gaac", replace(good, decode=lambda packed: good.decode(packed) | 1))
    result = run("verify", "--values", 1, "--formats", "gaac")
    assert result.exit_code == 6
    assert "BITS DIFFER" in result.stdout
    assert result.stdout.count("->") == 5


@pytest.mark.parametrize("values", ["0", "many", "1.5", "inf", "nan", "-1", "1e16"])
def test_verify_wants_a_whole_number(values):
    result = run("verify", "--values", values)
    assert result.exit_code == 2
    assert "must be a whole number from 1 to 1e15" in " ".join(result.stderr.replace("│", " ").split())
