"""Damaged trace files by the thousand: each one loads soundly or is refused by one clear line.

    PYTHONPATH=. python tests/long_traces_fuzz.py 100000 [seed]

Every format of tests/example_logs.py, plain and packed, takes part; each case is damaged in one to three places.
"""

from __future__ import annotations

import gzip
import io
import lzma
import random
import re
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import pyarrow as pa

from kvfold.traces import canonical, stream, synth
from kvfold.traces.errors import BadTraceError
from kvfold.traces.laws import validate
from kvfold.traces.load import load
from kvfold.traces.readers import FORMATS, Stated
from tests.example_logs import LOGS

_PIECES = (
    *(
        b"-1",
        b"1e999",
        b"-1e999",
        b"NaN",
        b"Infinity",
        b"null",
        b"true",
        b'""',
        b"0",
        b"-0.0",
        b"1e-400",
        b"1.5",
    ),
    *(
        b"9" * 20,
        b"9" * 5000,
        b"9223372036854775808",
        b"1e300",
        b"{",
        b"}",
        b"[",
        b"]",
        b"[]",
        b"{}",
        b'"',
        b",",
    ),
    *(
        b":",
        b"\\",
        b"\n",
        b"\r",
        b"\r\n",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\\ud800",
        b" ",
        b"#",
    ),
    *(b"[" * 3000, b'{"a":' * 3000, b'"timestamp": 1, ', b'"input_tokens": 5, ', b"x" * 5000, b"=1+1", b"'"),
    *(b"2023-02-30T25:61:61Z", b"9999-12-31T23:59:59.999999999+14:00", b"0001-01-01T00:00:00-14:00"),
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def fuzz(cases: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Outcomes by name, and what went wrong: any exception that is not a BadTraceError of one line.

    ``unlawful`` is a trace that loads and that `validate` refuses.
    """
    draw = random.Random(seed)
    seeds = _seeds(folder)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    path = folder / "case"
    for case in range(cases):
        if case and case % 5000 == 0:
            print(f"{case:,} of {cases:,}: {dict(outcomes)}", file=sys.stderr)
        content = _damaged(draw, draw.choice(seeds), seeds)
        path.write_bytes(content)
        format = draw.choice(FORMATS) if draw.random() < 0.2 else None
        outcome = _outcome(str(path), format, by_rows=draw.random() < 0.3)
        if outcome not in ("sound", "unlawful", "refused"):
            wrong.append(f"case {case} of seed {seed}, format {format}: {outcome}\n{content[:300]!r}")
            outcome = "wrong"
        outcomes[outcome] += 1
    return outcomes, wrong


def _outcome(path: str, format: str | None, by_rows: bool) -> str:
    stated = Stated(chars_per_token=4.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if by_rows:
                stream.inspect(path, format if format != "columns" else None, long_bytes=0)
                return "sound"
            trace = load(path, format if format != "columns" else None, stated=stated)
    except BadTraceError as error:
        line = str(error)
        return "refused" if "\n" not in line and len(line) < 1500 else f"a line of {len(line)} characters"
    except Exception:
        return traceback.format_exc(limit=-4)
    try:
        validate(trace)
    except BadTraceError:
        return "unlawful"
    except Exception:
        return traceback.format_exc(limit=-4)
    return "sound"


def _seeds(folder: Path) -> list[bytes]:
    trace = synth.sample(1)
    tables = []
    for suffix in canonical.SUFFIXES:
        canonical.write(trace, folder / f"t{suffix}")
        data = (folder / f"t{suffix}").read_bytes()
        if suffix != ".parquet":
            data = re.sub(rb'"rows":\d+,', b"", b"\n".join(data.splitlines()[:12]))
        tables.append(data)
    plain = [*LOGS.values(), *tables]
    some = plain[:: max(1, len(plain) // 5)]
    packed = [*map(gzip.compress, some), *map(lzma.compress, some), *map(_zstd, some), *map(_tar, some)]
    return plain * 4 + packed


def _zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data).to_pybytes()
    return packed


def _tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("a.json", "b.json"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _damaged(draw: random.Random, content: bytes, seeds: list[bytes]) -> bytes:
    for _ in range(draw.randint(1, 3)):
        content = _once(draw, content, seeds)
    return content


def _once(draw: random.Random, content: bytes, seeds: list[bytes]) -> bytes:
    at, end = sorted(draw.randint(0, len(content)) for _ in range(2))
    near = min(len(content), at + draw.choice((0, 1, 1, 2, 5, 20)))
    way = draw.randrange(9)
    if way == 0:
        return content[:at] + draw.choice(_PIECES) + content[near:]
    if way == 1 and content:
        at = min(at, len(content) - 1)
        return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
    if way == 2:
        return content[:at] + content[near:]
    if way == 3:
        return content[:end] + content[at:end] + content[end:]
    if way == 4:
        return content[:at]
    if way == 5:
        lines = content.split(b"\n")
        draw.shuffle(lines)
        return b"\n".join(lines)
    if way == 6:
        other = draw.choice(seeds)
        return content[:at] + other[draw.randint(0, len(other)) :]
    numbers = list(_NUMBER.finditer(content))
    if not numbers:
        return content[:at] + draw.choice(_PIECES) + content[at:]
    found = draw.choice(numbers)
    return content[: found.start()] + draw.choice(_PIECES[:20]) + content[found.end() :]


if __name__ == "__main__":
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes, wrong = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, Path(scratch))
    for text in wrong[:20]:
        print(text)
    print(dict(outcomes), f"{time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))
