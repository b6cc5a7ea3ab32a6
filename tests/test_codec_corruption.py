"""Broken containers: a typed error or the right data; no crash, no read outside, no large allocation."""

import subprocess
import sys
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest

from kvfold.codec import container
from kvfold.codec.cases import contents
from kvfold.codec.corruption import Outcomes, mutate, outcome, reseal, try_mutations
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.names import find_format, known_names
from kvfold.codec.windows import calibrate


def sample(name: str, tokens: int = 37) -> bytes:
    """A small container with two pages, a tail, and every mode and list in use."""
    rng = np.random.default_rng(3)
    patterns = contents("outlier", (2, tokens, 16), rng)
    kv_format = find_format(name)
    windows = calibrate([kv_format.coded(contents("normal", (2, 64, 16), rng))])
    return container.write(kv_format.encode(patterns, windows, 16), name, "k")


@pytest.mark.parametrize("name", known_names())
def test_truncated_at_every_byte(name):
    data = sample(name)
    for kept in range(len(data)):
        with pytest.raises(CorruptDataError) as caught:
            container.read(data[:kept])
        assert caught.value.offset is not None


@pytest.mark.parametrize("name", ["esc3", "fp8-e4m3"])
def test_every_flipped_bit_is_noticed(name):
    """Of header, pages and tail, whatever is in them: a checksum of 32 bits misses no single bit."""
    data = bytearray(sample(name))
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            with pytest.raises(CorruptDataError) as caught:
                container.read(bytes(data))
            assert caught.value.offset is not None
            data[byte] ^= 1 << bit


@pytest.mark.parametrize("name", known_names())
def test_every_flipped_header_bit_behind_good_checksums(name):
    """The rules of the fields, without the checksum's help: an error, or patterns of the claimed shape."""
    data = sample(name)
    expected, header_bytes = container.unpack(data), container.read(data).pages_at
    changed = bytearray(data)
    refused = 0
    for byte in range(header_bytes):
        for bit in range(8):
            changed[byte] ^= 1 << bit
            refused += outcome(reseal(bytes(changed)), expected, sealed=True) == "refused"
            changed[byte] ^= 1 << bit
    assert refused > 300


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", known_names())
def test_random_mutations(name, sealed):
    outcomes = try_mutations(sample(name), 3000, seed=1, sealed=sealed)
    assert outcomes.mutations == 3000
    assert outcomes.undetected == 0
    assert outcomes.refused > (1000 if sealed else 2800)


def test_mutations_are_counted_by_what_became_of_them(monkeypatch):
    data = sample("gaac")
    good = container.unpack(data)
    answers = iter([good, good, good ^ 1, CorruptDataError("no")])

    def unpack(_):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(container, "unpack", unpack)
    assert try_mutations(data, 3, seed=1, sealed=False) == Outcomes(refused=1, same=1, other=0, undetected=1)


def test_a_reader_without_checksums_would_be_caught(monkeypatch):
    """The law can fail: without its CRCs a container lets other data through."""
    import zlib

    monkeypatch.setattr(zlib, "crc32", lambda data: 0)
    data = sample("gaac")
    assert try_mutations(data, 300, seed=1, sealed=False).undetected > 0


def test_mutations_change_something():
    data, rng = sample("gaac"), np.random.default_rng(4)
    changed = [mutate(data, rng) for _ in range(300)]
    assert sum(new != data for new in changed) > 270
    assert len({len(new) for new in changed}) > 20


@pytest.mark.parametrize("name", known_names())
def test_reading_takes_no_more_than_the_file_may_claim(name):
    """Peak of every mutation: the file's own size times what its parts can grow to, and a page's work space."""
    data, rng = sample(name), np.random.default_rng(5)
    container.unpack(data)
    tracemalloc.start()
    try:
        for _ in range(300):
            changed = reseal(mutate(data, rng))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(CorruptDataError):
                container.unpack(changed)
            assert tracemalloc.get_traced_memory()[1] - before < 40 * len(changed) + (16 << 20)
    finally:
        tracemalloc.stop()


def test_a_claim_of_the_largest_sizes_allocates_nothing():
    data = bytearray(sample("bf16"))
    data[76:84] = (1 << 63).to_bytes(8, "little")
    changed = reseal(bytes(data))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError, match="tokens in blocks of 16 need a header of"):
            container.read(changed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


GUARDED = """
import ctypes, mmap, sys
from dataclasses import replace
import numpy as np
sys.path.insert(0, sys.argv[1])
from test_codec_corruption import sample
from kvfold.codec import container
from kvfold.codec.corruption import mutate, reseal
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.names import find_format, known_names

libc = ctypes.CDLL(None, use_errno=True)
kept = mmap.mmap(-1, 16 * mmap.PAGESIZE)
base = ctypes.addressof(ctypes.c_char.from_buffer(kept))
for guard in (0, 15):
    address = ctypes.c_void_p(base + guard * mmap.PAGESIZE)
    assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
inside = np.frombuffer(kept, np.uint8)[mmap.PAGESIZE : 15 * mmap.PAGESIZE]
if sys.argv[2] == "touch the guard":
    np.frombuffer(kept, np.uint8)[15 * mmap.PAGESIZE]
tried = 0
rng = np.random.default_rng(6)
for name in known_names():
    data = sample(name)
    for _ in range(500):
        try:
            packed = container.read(reseal(mutate(data, rng))).packed
        except CorruptDataError:
            continue
        size = len(packed.pages)
        for place in (inside[:size], inside[len(inside) - size :]):
            place[:] = packed.pages
            tried += 1
            try:
                find_format(name).decode(replace(packed, pages=place))
            except (CorruptDataError, ValueError):
                pass
print(tried)
"""


def guarded(what: str) -> subprocess.CompletedProcess:
    from pathlib import Path

    here = str(Path(__file__).parent)
    return subprocess.run([sys.executable, "-c", GUARDED, here, what], capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages by mprotect")
def test_decoders_read_nothing_outside_the_pages():
    """Pages against an unreadable page of memory, before and behind: one byte too far ends the process."""
    result = guarded("decode")
    assert result.returncode == 0, result.stderr[-500:]
    assert int(result.stdout) > 16 * 300


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages by mprotect")
def test_the_guard_ends_the_process():
    assert guarded("touch the guard").returncode < 0
