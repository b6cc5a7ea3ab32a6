"""Golden containers: every one ever written decodes to its patterns, and the encoder still writes its bytes."""

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvfold.codec import container
from kvfold.codec.cases import CONTENTS
from kvfold.codec.golden import OTHER_AXIS, encoder_of, golden_bytes, golden_names, write_missing
from kvfold.codec.header import VERSION
from kvfold.codec.names import cast_of, find_format, find_fp8
from kvfold.codec.reference import decode_escape, decode_fixed3, decode_fixed4, decode_gaac, decode_tags

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(FOLDER.glob("*.bin"))
PLAIN_DECODERS = {
    "gaac": decode_gaac,
    "gaac-2bit": decode_gaac,
    "fixed4": decode_fixed4,
    "fixed3": decode_fixed3,
    "esc3": partial(decode_escape, code_bits=3),
    "esc2-2": partial(decode_escape, code_bits=2),
    "tag8": partial(decode_tags, group=8),
    "tag32": partial(decode_tags, group=32),
}


def parts_of(path: Path) -> tuple[str, str, str]:
    """Version, format and contents: ``v0_1``, ``gaac``, ``outlier``."""
    major, minor, format_name, contents_kind = path.stem.split("_")
    return f"{major}_{minor}", format_name, contents_kind


def patterns_of(path: Path) -> np.ndarray:
    """The patterns as the raw file of the same contents holds them: no random generator is needed to know them."""
    version, _, contents_kind = parts_of(path)
    of_axis = next((suffix for suffix, _ in OTHER_AXIS.values() if contents_kind.endswith(suffix)), "")
    kind = contents_kind.removesuffix(of_axis)
    return container.unpack((FOLDER / f"{version}_bf16_{kind}.bin").read_bytes())


def test_none_was_changed_added_or_lost():
    listed = dict(line.split("  ")[::-1] for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES}
    assert len(FILES) >= 200
    assert sum(path.stat().st_size for path in FILES) < 400_000


def test_every_format_has_files_of_this_version():
    version = f"v{VERSION[0]}_{VERSION[1]}"
    expected = {f"{version}_{name}_{kind}.bin" for name, kind in golden_names()}
    assert {path.name for path in FILES} >= expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_decodes_to_its_patterns(path):
    data = path.read_bytes()
    kv_format = find_format(parts_of(path)[1])
    assert np.array_equal(container.unpack(data), kv_format.stored(patterns_of(path)))
    if cast_of(parts_of(path)[1]):
        fp8_format = find_fp8(parts_of(path)[1])
        values = fp8_format.decode(container.read(data).packed)
        assert np.array_equal(values, fp8_format.cast(patterns_of(path)))


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if parts_of(path)[0] == f"v{VERSION[0]}_{VERSION[1]}"],
    ids=lambda p: p.stem,
)
def test_the_encoder_writes_the_same_bytes(path):
    """With the windows that the file holds, so that neither calibration nor random numbers matter."""
    contents = container.read(path.read_bytes())
    packed = encoder_of(*parts_of(path)[1:]).encode(
        patterns_of(path), contents.packed.windows, contents.packed.block_tokens
    )
    assert container.write(packed, contents.format_name, contents.kind) == path.read_bytes()


def test_raw_files_hold_the_patterns_as_they_are():
    """The one format that needs no decoder, checked by hand: the last bytes are the tail, the page before it."""
    for kind in CONTENTS:
        data = (FOLDER / f"v0_1_bf16_{kind}.bin").read_bytes()
        patterns = container.unpack(data)
        assert patterns.shape == (2, 37, 16)
        assert data.endswith(
            patterns[:, 16:32].astype("<u2").tobytes() + patterns[:, 32:].astype("<u2").tobytes()
        )


def test_files_that_are_there_are_never_written_again(tmp_path):
    first = tmp_path / "v0_1_gaac_normal.bin"
    first.write_bytes(b"older")
    written = write_missing(tmp_path)
    assert first not in written
    assert first.read_bytes() == b"older"
    assert len(written) == len(golden_names()) - 1
    assert write_missing(tmp_path) == []
    assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == len(written) + 1
    assert golden_bytes("esc3", "outlier") == (tmp_path / "v0_1_esc3_outlier.bin").read_bytes()
