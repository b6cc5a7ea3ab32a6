"""The same launch a hundred times, on several streams and beside other work: one distinct result."""

import hashlib

import pytest
import torch

from kvfold.kernels import bf16
from kvfold.kernels.fixed3_pack import empty_slots
from kvfold.kernels.fixed3_pages import LIST_BYTES
from kvfold.kernels.fixed4_pack import slot_bytes
from kvfold.kernels.fused import FIXED4, FUSED
from kvfold.kernels.inputs import Case, draw, keys, raw_pages, values

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
@pytest.mark.parametrize("name", ["bf16", *(fused.name for fused in FUSED)])
def test_attention(name, schedule):
    splits, programs = schedule
    drawn = draw(CASE, "cuda")
    kernel, pages = bf16.attend, raw_pages(drawn)
    for fused in FUSED:
        if fused.name == name:
            kernel, (pages, _, _) = fused.attend, fused.pack_drawn(drawn)
    assert len(results(lambda: kernel(drawn.q, pages, 0.09, splits, programs=programs))) == 1


@pytest.mark.parametrize("schedule", [(1, None), (3, None), (1, 7)], ids=str)
@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.name)
def test_copies_on_their_way_change_no_bit(fused, schedule):
    splits, programs = schedule
    drawn = draw(CASE, "cuda")
    kv, _, _ = fused.pack_drawn(drawn)
    one, two = (fused.attend(drawn.q, kv, 0.09, splits, programs=programs, copies=n) for n in (1, 2))
    assert torch.equal(one, two)


def poisoned(fused, pages):
    """Room for packed pages of one side, and all its bytes."""
    if fused is FIXED4:
        side = torch.empty((pages, 8, slot_bytes(256, 128)), dtype=torch.uint8, device="cuda")
        parts = [side]
    else:
        side = empty_slots(pages, 8, 256, 128, LIST_BYTES, torch.device("cuda"))
        parts = [side.mains, side.lists, side.entries]
    parts = [part.view(torch.uint8).view(-1) for part in parts]
    for part in parts:
        part.fill_(0xA5)
    return side, parts


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.name)
def test_packing_and_unpacking(fused, kind):
    fill = keys if kind == "k" else values
    raw = fill((16, 8, 64, 128), torch.Generator("cuda").manual_seed(11))
    places = torch.arange(4, dtype=torch.int32, device="cuda")
    pages = torch.arange(16, dtype=torch.int32, device="cuda").view(4, 4)
    side, _ = poisoned(fused, 4)
    fused.pack(raw, pages, side, places, kind, 256)

    def packed():
        own, parts = poisoned(fused, 4)
        counts = fused.pack(raw, pages, own, places, kind, 256)
        return torch.cat([*parts, counts.view(torch.uint8).view(-1)])

    def unpacked():
        out = torch.full_like(raw, float("nan"))
        fused.unpack(side, places, out, pages, kind, 256)
        return out

    assert len(results(packed)) == 1
    assert len(results(unpacked)) == 1
