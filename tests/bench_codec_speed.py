"""Encode and decode of every format and of general compressors, by pytest-benchmark, on the same tensors.

    python -m pytest tests/bench_codec_speed.py --benchmark-columns=min,median,iqr,rounds

A person starts it (its name keeps it out of `make test`). `tests/bench_codec.py` prints the same as one table with
ratios and random access, and is what docs/codec.md shows.
"""

import pytest

from kvfold.codec.formats import FORMATS, with_parameters
from tests.bench_codec import OTHER_ORDERS, compressors, tensors
from tests.conftest import SHARED_DATA

NAMES = [*FORMATS, *OTHER_ORDERS]
RIVALS, ABSENT = compressors()


@pytest.fixture(scope="module")
def inputs():
    folder = SHARED_DATA / "kv"
    if not folder.is_dir():
        pytest.skip(f"the real tensors {folder} are not here")
    return tensors(folder)


def report(benchmark, inputs, direction):
    raw_bytes = sum(tensor.patterns.nbytes for tensor in inputs)
    benchmark.group = direction
    benchmark.extra_info["raw_gb_per_s_median"] = raw_bytes / benchmark.stats.stats.median / 1e9


@pytest.mark.parametrize("name", NAMES)
def test_encode(benchmark, inputs, name):
    kv_format = with_parameters(name)
    benchmark(lambda: [kv_format.encode(t.patterns, t.windows, kv_format.block_tokens) for t in inputs])
    report(benchmark, inputs, "encode")


@pytest.mark.parametrize("name", NAMES)
def test_decode(benchmark, inputs, name):
    kv_format = with_parameters(name)
    packed = [kv_format.encode(t.patterns, t.windows, kv_format.block_tokens) for t in inputs]
    benchmark(lambda: [kv_format.decode(pages) for pages in packed])
    report(benchmark, inputs, "decode")


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_rival_encode(benchmark, inputs, rival):
    whole = [tensor.patterns.tobytes() for tensor in inputs]
    benchmark(lambda: [rival.compress(data) for data in whole])
    report(benchmark, inputs, "encode")


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_rival_decode(benchmark, inputs, rival):
    packed = [rival.compress(tensor.patterns.tobytes()) for tensor in inputs]
    benchmark(lambda: [rival.decompress(data) for data in packed])
    report(benchmark, inputs, "decode")
