"""The same launch a hundred times, on several streams and beside other work: one distinct result."""

import hashlib

import pytest
import torch

from kvfold.kernels import bf16, fixed4
from kvfold.kernels.fixed4_pack import pack
from kvfold.kernels.fixed4_unpack import unpack
from kvfold.kernels.inputs import Case, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="races need an NVIDIA GPU")
LAUNCHES = 100
# Ragged, with raw blocks among packed ones and a tail; more programs than run at once, and fewer.
CASE = Case((9000, 300, 4097, 1), 8, 4, 128, 256, 64, raw_share=0.2, seed=11)


def results(launch):
    """The distinct results, as hashes, of launches on three streams, every other one beside a large product."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    noise = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    outs = []
    for number in range(LAUNCHES):
        with torch.cuda.stream(streams[number % 3]):
            if number % 2:
                noise @ noise
            outs.append(launch())
    torch.cuda.synchronize()
    return {hashlib.sha256(out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for out in outs}


@pytest.mark.parametrize("schedule", [(1, None), (3, None), (16, None), (1, 7), (1, 132), (1, 1000)], ids=str)
@pytest.mark.parametrize("name", ["bf16", "fixed4"])
def test_attention(name, schedule):
    splits, programs = schedule
    q, kv, raw = make(CASE, "cuda")
    kernel, pages = (bf16.attend, raw) if name == "bf16" else (fixed4.attend, kv)
    assert len(results(lambda: kernel(q, pages, 0.09, splits, programs=programs))) == 1


@pytest.mark.parametrize("kind", ["k", "v"])
def test_packing_and_unpacking(kind):
    _, kv, _ = make(CASE, "cuda")
    records, raw = (kv.packed_k, kv.raw_k) if kind == "k" else (kv.packed_v, kv.raw_v)
    places = torch.arange(4, dtype=torch.int32, device="cuda")
    pages = torch.arange(16, dtype=torch.int32, device="cuda").view(4, 4)

    def packed():
        out = torch.full_like(records[:4], 0xA5)
        return torch.cat(
            [out.flatten(), pack(raw, pages, out, places, kind, 256).view(torch.uint8).flatten()]
        )

    def unpacked():
        out = torch.full_like(raw[:16], float("nan"))
        unpack(records, places, out, pages, kind, 256)
        return out

    assert len(results(packed)) == 1
    assert len(results(unpacked)) == 1
