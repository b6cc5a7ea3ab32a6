"""Calibration files: what is written comes back, every changed character is noticed, rotation cures drift."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvfold.codec import gaac
from kvfold.codec.calibration import Slot, Table, choose, dump, load, rotated_copies, windows_from
from kvfold.codec.cases import contents
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.rope import Rope, rotate, rotations
from kvfold.codec.windows import Windows, calibrate, rotate_keys


def table(layer: int | None = 3, kind="k", cast: str = "", per="channel") -> Table:
    windows = windows_from([contents("normal", (2, 100, 16), np.random.default_rng(1))], per)
    slots = (Slot("gaac", 64, 1440), Slot("esc3", 64, 1424))
    return Table(windows, layer, kind, cast, per, 100, (100, 200), {"theta": 1e4, "layout": "half"}, slots)


@pytest.mark.parametrize("inner", [False, True])
def test_what_is_written_comes_back(inner):
    one = table()
    if not inner:
        one = replace(one, windows=Windows(one.windows.narrow_base, one.windows.wide_base))
    text = dump([one, table(None, None), table(cast="fp8-e4m3")])
    loaded = load(text)
    assert dump(loaded) == text
    back = loaded[0]
    assert np.array_equal(back.windows.narrow_base, one.windows.narrow_base)
    assert np.array_equal(back.windows.wide_base, one.windows.wide_base)
    assert (back.windows.inner_bases is not None) == inner
    if inner:
        assert np.array_equal(back.windows.inner_bases, one.windows.inner_bases)
    for name in ("layer", "kind", "cast", "per", "tokens", "rotated_by_tokens", "rope", "slots"):
        assert getattr(back, name) == getattr(one, name)
    assert back.slot_bytes("gaac", 64) == 1440
    assert back.slot_bytes("gaac", 32) is None


def test_every_truncation_and_changed_digit_is_noticed():
    text = dump([table()])
    for kept in range(len(text) - 1):
        with pytest.raises(CorruptDataError):
            load(text[:kept])
    for place, character in enumerate(text):
        if character.isalnum():
            changed = text[:place] + ("1" if character != "1" else "2") + text[place + 1 :]
            with pytest.raises(CorruptDataError):
                load(changed)


def with_tables(**changes) -> str:
    """The text of a file with one table whose fields are changed, its checksum right."""
    import zlib

    file = json.loads(dump([table()]))
    file["tables"][0] |= changes
    file["crc32"] = zlib.crc32(json.dumps(file["tables"], sort_keys=True).encode())
    return json.dumps(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "byte 0: a calibration file must be JSON"),
        ("[1, 2", "byte [56]: a calibration file must be JSON"),
        ("[" * 100_000, "must be JSON: RecursionError"),
        ("[]", 'must be a JSON object with "kvfold_calibration"'),
        ('{"kvfold_calibration": "0.2"}', "this program reads version 0.1, got '0.2'"),
        ('{"kvfold_calibration": "0.1"}', "must have crc32 and a list of tables"),
        ('{"kvfold_calibration": "0.1", "crc32": 1, "tables": []}', "crc32 of the tables must be"),
        ('{"kvfold_calibration": NaN}', "must hold finite numbers, got NaN"),
        (with_tables(shape=[2, 17]), "a table breaks a rule"),
        (with_tables(shape=[1 << 20, 1 << 20]), "must have 1 to 16777216 channels"),
        (with_tables(shape=[2]), "a table breaks a rule"),
        (with_tables(windows={"8": "AAAA"}), "windows must be of 8, 16, 3, 4, 6, 7 exponents, got"),
        (with_tables(windows={"8": "!", "16": "!"}), "a table breaks a rule"),
        (with_tables(windows={"8": "/" * 42 + "8=", "16": "A" * 43 + "="}), "must be at most 248, got 255"),
        (with_tables(surprise=1), "surprise"),
        (with_tables(slots=[{"format_name": "gaac"}]), "a table breaks a rule"),
    ],
)
def test_bad_files_are_refused(text, message):
    with pytest.raises(CorruptDataError, match=message):
        load(text)


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(
        ValueError, match="one table per layer and kind, got layer 3, k, bf16, layer 3, k, bf16"
    ):
        dump([table(), table()])


def test_a_table_is_chosen_by_layer_kind_and_cast():
    tables = [table(0, "k"), table(0, "v"), table(1, "k"), table(1, "k", "fp8-e4m3")]
    assert choose(tables, 0, "v", "") is tables[1]
    assert choose(tables, 1, None, "") is tables[2]
    assert choose(tables, None, None, "fp8-e4m3") is tables[3]
    with pytest.raises(
        ValueError, match="one table must be of layer 0, k or v, bf16, got 2 of layer 0, k, bf16;"
    ):
        choose(tables, 0, None, "")
    with pytest.raises(ValueError, match="one table must be of any layer, v, fp8-e5m2, got 0"):
        choose(tables, None, "v", "fp8-e5m2")


def test_windows_per_layer_are_those_of_all_channels_together():
    patterns = contents("normal", (3, 50, 8), np.random.default_rng(2))
    shared = windows_from([patterns], "layer")
    together = calibrate([patterns.transpose(0, 2, 1).reshape(1, -1, 1)])
    assert (shared.narrow_base == together.narrow_base[0, 0]).all()
    assert (shared.wide_base == together.wide_base[0, 0]).all()
    assert shared.narrow_base.shape == (3, 8)
    apart = windows_from([patterns[:, :20], patterns[:, 20:]])
    assert np.array_equal(apart.narrow_base, calibrate([patterns]).narrow_base)
    with pytest.raises(ValueError, match="must agree in kv_heads and head_dim"):
        windows_from([patterns, patterns[:2]])


def keys(head_dim: int = 8) -> np.ndarray:
    return contents("normal", (2, 5, head_dim), np.random.default_rng(3))


def test_interleaved_is_half_split_with_its_channels_dealt_out():
    interleaved = rotate(keys(), 300, Rope(1e4, "interleaved"))
    halves = np.concatenate([keys()[..., ::2], keys()[..., 1::2]], axis=-1)
    turned = rotate_keys(halves, 300, 1e4)
    assert np.array_equal(interleaved[..., ::2], turned[..., :4])
    assert np.array_equal(interleaved[..., 1::2], turned[..., 4:])
    assert not np.array_equal(interleaved, rotate(keys(), 300, Rope(1e4)))


def test_interleaved_pairs_are_complex_numbers_that_turn():
    values = (keys().astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    pairs = values[..., ::2] + 1j * values[..., 1::2]
    turned = pairs * np.exp(1j * 7 * 1e4 ** (-2 * np.arange(4) / 8))
    rotated = (rotate(keys(), 7, Rope(1e4, "interleaved")).astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(rotated[..., ::2], turned.real, rtol=2**-8, atol=0)
    assert np.allclose(rotated[..., 1::2], turned.imag, rtol=2**-8, atol=0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_only_the_rotary_channels_turn(layout):
    rope = Rope(1e4, layout, rotary_dim=6)
    turned = rotate(keys(), 40, rope)
    assert np.array_equal(turned[..., 6:], keys()[..., 6:])
    assert np.array_equal(turned[..., :6], rotate(keys()[..., :6], 40, Rope(1e4, layout)))


@pytest.mark.parametrize(
    ("tokens", "to", "every", "expected"),
    [
        (2048, 8192, None, (2048, 4096, 6144)),
        (2048, 32768, 4096, (4096, 8192, 12288, 16384, 20480, 24576, 28672, 30720)),
        (1000, 2500, None, (1000, 1500)),
        (1000, 1000, None, ()),
        (1000, 1001, None, (1,)),
    ],
)
def test_rotations_reach_the_last_position(tokens, to, every, expected):
    assert rotations(tokens, to, every) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotations(1000, 999), "got 999 by steps of 1000"),
        (lambda: rotations(1000, 2000, 0), "got 2000 by steps of 0"),
        (lambda: Rope(0.5), "rope theta must be above 1, got 0.5"),
        (lambda: Rope(float("nan")), "rope theta must be above 1, got nan"),
        (lambda: Rope(1e4, "spiral"), "one of half, interleaved, got 'spiral'"),  # type: ignore[arg-type]
        (lambda: Rope(1e4, rotary_dim=5), "rotary_dim must be even and at least 2, got 5"),
        (lambda: rotate(keys(), 1, Rope(1e4, rotary_dim=10)), "at most head_dim 8, got 10"),
        (lambda: rotate(np.full((1, 1, 4), 0x7F80, np.uint16), 1, Rope(1e4)), "must be finite, got 4"),
    ],
)
def test_what_rope_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rotation_gives_late_keys_the_ratio_and_misses_of_early_ones(shared_data):
    """The drift case: K of layer 14 at 6144..8191 with windows of 0..2047."""
    early = np.load(shared_data / "kv" / "smollm2_135m_prose_L14_k.npy")
    late = np.load(shared_data / "kv" / "smollm2_135m_code_pos6144_L14_k.npy")

    def measured(arrays: list[np.ndarray]) -> tuple[float, float]:
        windows = windows_from(arrays)
        packed = gaac.encode(late, windows, 64)
        own = gaac.encode(early, windows, 64)
        misses = gaac.count_exceptions(late, packed) / gaac.count_exceptions(early, own)
        return 2 * late.size / len(packed.pages), misses

    ratio, misses = measured(rotated_copies([early], Rope(1e5), rotations(2048, 8192)))
    assert ratio == pytest.approx(1.4096, rel=0.005)
    assert misses <= 1.2
    ratio, misses = measured([early])
    assert ratio == pytest.approx(1.396, rel=0.005)
    assert misses > 2
