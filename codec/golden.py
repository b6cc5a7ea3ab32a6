"""Golden containers: bytes written once per format and version, which every later version must read.

    python -m kvfold.codec.golden FOLDER

writes the files that FOLDER lacks and never touches one that is there. A file is named after the container's
version, its format and its contents; the patterns in it follow from that name, so that only containers are
kept. SHA256SUMS lists them all.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec import container
from kvfold.codec.cases import CONTENTS, contents
from kvfold.codec.header import VERSION
from kvfold.codec.names import find_format, known_names
from kvfold.codec.windows import calibrate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.formats import Format

# Small, yet with pages and a tail; every format takes these sizes: kv_heads, tokens, head_dim.
SHAPES = {"": (2, 37, 16), "-one": (1, 19, 24)}
BLOCK_TOKENS = 16
CALIBRATION_TOKENS = 64
# The other value of the header's axis, where a format has one: what it adds to the contents' name, its encoder.
OTHER_AXIS = {
    "gaac": ("-token", "gaac:axis=token"),
    "fixed4": ("-v", "fixed4:kind=v"),
    "fixed3": ("-v", "fixed3:kind=v"),
}


def file_name(format_name: str, contents_kind: str) -> str:
    """``v0_1_gaac_outlier.bin``"""
    major, minor = VERSION
    return f"v{major}_{minor}_{format_name}_{contents_kind}.bin"


def golden_names() -> list[tuple[str, str]]:
    """Format and contents of every golden file of this version."""
    names = [(name, kind + size) for name in known_names() for size in SHAPES for kind in CONTENTS]
    return names + [(name, kind + suffix) for name, (suffix, _) in OTHER_AXIS.items() for kind in CONTENTS]


def encoder_of(format_name: str, contents_kind: str) -> Format:
    """The format that writes a golden file, its axis included."""
    suffix, other_axis = OTHER_AXIS.get(format_name, ("", ""))
    return find_format(other_axis if suffix and contents_kind.endswith(suffix) else format_name)


def golden_patterns(contents_kind: str) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """The patterns in a golden file and those that its windows were calibrated on, from PCG64 seeds."""
    kind, dash, size = contents_kind.partition("-")
    kv_heads, tokens, head_dim = SHAPES.get(dash + size, SHAPES[""])
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(kind.encode())))
    calibration = contents("normal", (kv_heads, CALIBRATION_TOKENS, head_dim), rng)
    return contents(kind, (kv_heads, tokens, head_dim), rng), calibration


def golden_bytes(format_name: str, contents_kind: str) -> bytes:
    """The container that this program writes of one format and contents."""
    kv_format = encoder_of(format_name, contents_kind)
    patterns, calibration = golden_patterns(contents_kind)
    windows = calibrate([kv_format.coded(calibration)])
    return container.write(kv_format.encode(patterns, windows, BLOCK_TOKENS), format_name, "k")


def write_missing(folder: Path) -> list[Path]:
    """Write the golden files of this version that ``folder`` lacks, and SHA256SUMS; the paths written."""
    written = []
    for name, kind in golden_names():
        path = folder / file_name(name, kind)
        if not path.exists():
            path.write_bytes(golden_bytes(name, kind))
            written.append(path)
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.glob("*.bin"))
    ]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kvfold.codec.golden FOLDER")
    for path in write_missing(Path(sys.argv[1])):
        print(path.name)
