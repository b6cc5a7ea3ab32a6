"""Times of attention and packing on this GPU: rows of the cost table that the simulator reads.

Both sides of every ratio run in one process, on the same pages in shuffled order, launched from CUDA graphs,
with nothing of their own in the cache. Nothing is timed before the gate has passed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.codec.fp8 import E4M3, E5M2
from kvfold.kernels import bf16, fa3, fixed4, fixed4_portable, fp8, gaac_attend, inputs
from kvfold.kernels.bench_pages import (
    BLOCK_TOKENS,
    FP8_PAGE_TOKENS,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    PAGE_TOKENS,
    TOKEN_BYTES,
    Pool,
)
from kvfold.kernels.fixed4_unpack import unpack
from kvfold.kernels.fused import FIXED4, FUSED
from kvfold.kernels.gaac_attend import GaacKv
from kvfold.kernels.timing import (
    BitsDifferError,
    Row,
    burst,
    distinct_results,
    fastest,
    replayed,
    sustained,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvfold.kernels.fused import Fused
    from kvfold.kernels.pages import PagedKv

SCALE = HEAD_DIM**-0.5
GAAC_BLOCK_TOKENS = 64
BATCHES = (1, 4, 8, 32, 128, 256)
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
POINTS = (*((b, n) for b in BATCHES for n in CONTEXTS), (32, 8192), (4, 32768))
MOST_KV_BYTES = 32 * 10**9
SUSTAINED_POINTS = ((8, 65536), (32, 8192), (1, 131072))
SLOW_POINT = (8, 65536)  # where slow ways to attend are timed too, for the account
FA3_TOLERANCE = 2.0**-7  # two results whose weights and, there, outputs are rounded to BF16
SUSTAINED_FORMATS = ("bf16", *(fused.name for fused in FUSED))
LAUNCHES = 100
# Tokens of a tile, stages of its pipeline, and how many programs deep to fill the GPU.
BF16_CONFIGS = ((64, 4, (2, 4)), (64, 5, (2, 3)), (64, 7, (2,)), (128, 3, (1, 2)), (128, 5, (1, 2)))
PACK_BLOCKS = (1, 16, 256, 2048)
GAAC_PAGES = 128  # that are encoded; the pool repeats them
FORMATS = ("bf16", *(fused.name for fused in FUSED), "gaac", E4M3.name, E5M2.name)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to attend at one point: its launches by label, and what it must read and write.

    Ways that are not tuned have a parameter behind the format's name: the simulator, which takes rows of plain
    names, leaves them alone.
    """

    format: str
    launches: Mapping[str, Callable[[], torch.Tensor]]
    bytes: int
    page_tokens: int | None
    is_peer: bool = True  # whether its bits and energy are looked at, too


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's kernel over the same bytes of BF16."""

    label: str
    launch: Callable[[], torch.Tensor]
    page_tokens: int | None


@dataclass(frozen=True, slots=True)
class Timed:
    """A launch that was timed, and its row."""

    launch: Callable[[], torch.Tensor]
    row: Row
    is_ours: bool  # whether its bits and energy are looked at, too


def compile_kernels(points: Sequence[tuple[int, int]], formats: Sequence[str], jobs: int) -> None:
    """Fill Triton's cache with what is to be timed, each kernel compiled by one of so many processes."""
    with get_context("spawn").Pool(jobs) as pool:
        pool.starmap(_compile_part, [(points, formats, part, jobs) for part in range(jobs)], chunksize=1)


def _compile_part(points: Sequence[tuple[int, int]], formats: Sequence[str], part: int, parts: int) -> None:
    pool = Pool(16 * BLOCK_TOKENS, "cuda", formats)
    number = 0
    for point in points:
        for way in _ways(pool, point, formats):
            for launch in way.launches.values():
                if number % parts == part:
                    launch()
                number += 1
    torch.cuda.synchronize()


def attend_tasks(
    points: Sequence[tuple[int, int]],
    formats: Sequence[str],
    device: str,
    say: Callable[[str], None],
    fa3_library: Path | None = None,
) -> Iterator[tuple[str, Iterator[Row]]]:
    """Attention at every point, in every format and by torch's backends: names, and rows timed when asked for.

    With ``fa3_library`` (`kvfold.kernels.fa3`) vLLM's kernel is one more peer; raises BitsDifferError where it
    attends wrongly.
    """
    largest = max(math.prod(point) for point in points)
    pool = Pool(largest, device, formats)
    peers = partial(_peers, pool, None if fa3_library is None else _checked_fa3(fa3_library, pool))
    timed: list[Timed] = []
    for point in points:
        name = "attend {} x {}".format(*point)
        yield name, _bursts(point, partial(_ways, pool, point, formats), peers, timed)
    # Only now: a GPU that has run back to back, at its power cap, is slower for a while.
    yield "attend, replayed", _replayed(timed)
    yield "attend, sustained", _sustained(timed, say)
    if "gaac" in formats:
        timed.clear()
        pool.packed.clear()
        pool.cast.clear()
        slots = _gaac_slots(pool, largest, device)
        for point in points:
            ways = partial(_gaac, pool, slots, point)
            yield "attend gaac {} x {}".format(*point), _bursts(point, ways, lambda point: [], timed)
        yield "attend gaac, sustained", _sustained(timed, say)


def _bursts(
    point: tuple[int, int],
    ways: Callable[[], list[Way]],
    peers: Callable[[tuple[int, int]], Iterable[Peer]],
    timed: list[Timed],
) -> Iterator[Row]:
    """Single launches of the fastest of each way and of peers; ``timed`` gets all of them."""
    batch, context = point
    shape: dict[str, Any] = {
        "batch": batch,
        "context_tokens": context,
        "q_heads": KV_HEADS * GROUP,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    for way in ways():
        label, launch, times = fastest(way.launches)
        row = Row("attend", way.format, label, *times, bytes=way.bytes, page_tokens=way.page_tokens, **shape)
        timed.append(Timed(launch, row, way.is_peer))
        yield row
    for peer in peers(point):
        try:
            times = burst(peer.launch)
        except RuntimeError:
            continue  # a backend that refuses the shape has no row
        size = batch * context * TOKEN_BYTES
        row = Row("attend", "bf16", peer.label, *times, bytes=size, page_tokens=peer.page_tokens, **shape)
        timed.append(Timed(peer.launch, row, is_ours=False))
        yield row


def _replayed(timed: Sequence[Timed]) -> Iterator[Row]:
    """BF16, our kernel and others', as public times of it were measured."""
    for each in timed:
        if each.row.format == "bf16":
            median_us, p10_us, p90_us = replayed(each.launch)
            format_ = "bf16:timed=replays"
            yield replace(each.row, format=format_, median_us=median_us, p10_us=p10_us, p90_us=p90_us)


def _sustained(timed: Sequence[Timed], say: Callable[[str], None]) -> Iterator[Row]:
    """Our kernels at some points: one result of many launches, and their energy."""
    for each in timed:
        row, point = each.row, (each.row.batch, each.row.context_tokens)
        if point not in SUSTAINED_POINTS or not each.is_ours:
            continue
        found = distinct_results(each.launch, LAUNCHES)
        where = f"{row.kernel} at {row.batch} x {row.context_tokens}"
        result = f"{where}: {LAUNCHES} launches, {found} distinct result(s)"
        say(result)
        if found != 1:
            raise BitsDifferError(result)
        if row.format in SUSTAINED_FORMATS or point == SLOW_POINT:
            mean_us, energy_mj = sustained(each.launch)
            yield replace(row, median_us=mean_us, p10_us=None, p90_us=None, energy_mj=energy_mj, sustained=1)


def _queries(batch: int, pool: Pool) -> torch.Tensor:
    device = pool.raw_k.device
    return inputs.queries(batch, KV_HEADS * GROUP, HEAD_DIM, torch.Generator(device).manual_seed(1))


def _ways(pool: Pool, point: tuple[int, int], formats: Sequence[str]) -> list[Way]:
    batch, context = point
    tokens = batch * context
    q = _queries(batch, pool)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    raw = pool.raw(batch, context)
    ways = []
    if "bf16" in formats:
        launches: dict[str, Callable[[], torch.Tensor]] = {}
        for tile, stages, waves in BF16_CONFIGS:
            for splits in _splits(batch, context // tile, processors, waves):
                launches[f"kvfold bf16 tile={tile} stages={stages} splits={splits}"] = partial(
                    bf16.attend, q, raw, SCALE, splits, out, tile, stages
                )
        for programs in (2 * processors, 3 * processors):
            launches[f"kvfold bf16 tile=64 stages=4 programs={programs}"] = partial(
                bf16.attend, q, raw, SCALE, 1, out, 64, 4, programs=programs
            )
        ways.append(Way("bf16", launches, tokens * TOKEN_BYTES, PAGE_TOKENS))
    for fused in FUSED:
        if fused.name not in formats:
            continue
        kv = pool.fused(fused, batch, context)
        launches = {
            f"kvfold {fused.name} splits={splits}": partial(fused.attend, q, kv, SCALE, splits, out)
            for splits in _splits(batch, context // BLOCK_TOKENS, processors, (1, 2, 4))
        }
        # As many programs as run at once, or as divide a batch of equal sequences evenly.
        even = processors - processors % 32
        for programs in (even, processors, 2 * even, 2 * processors):
            launches[f"kvfold {fused.name} programs={programs}"] = partial(
                fused.attend, q, kv, SCALE, 1, out, programs=programs
            )
        size = tokens // BLOCK_TOKENS * pool.block_bytes(fused)
        ways.append(Way(fused.name, launches, size, BLOCK_TOKENS))
        if fused is FIXED4 and point == SLOW_POINT:
            ways += _slow_ways(pool, q, kv, raw, size)
    for name, (k, v, k_scale, v_scale) in pool.cast.items():
        cast = replace(pool.raw(batch, context, FP8_PAGE_TOKENS), raw_k=k, raw_v=v)
        launches = {}
        for tile, stages in ((128, 5), (64, 5)):
            for splits in _splits(batch, context // tile, processors, (1, 2)):
                launches[f"kvfold {name} tile={tile} stages={stages} splits={splits}"] = partial(
                    fp8.attend, q, cast, SCALE, splits, out, k_scale, v_scale, tile, stages
                )
        ways.append(Way(name, launches, tokens * TOKEN_BYTES // 2, FP8_PAGE_TOKENS))
    return ways


def _slow_ways(pool: Pool, q: torch.Tensor, kv: PagedKv, raw: PagedKv, packed_bytes: int) -> list[Way]:
    """`fixed4` without the tuned kernel: unpacked to memory first, and decoded in plain Triton."""
    places = kv.table.packed_pages.flatten().contiguous()
    listed = pool.listed[places.long()].contiguous()
    raw_bytes = int(raw.table.raw_tokens.sum()) * TOKEN_BYTES

    def unpack_then_attend() -> torch.Tensor:
        unpack(kv.packed_k, places, raw.raw_k, listed, "k", BLOCK_TOKENS)
        unpack(kv.packed_v, places, raw.raw_v, listed, "v", BLOCK_TOKENS)
        return bf16.attend(q, raw, SCALE, 4, tile_tokens=64, stages=4)

    return [
        Way(
            "fixed4:kernel=unpack",
            {"kvfold fixed4 unpack, then bf16": unpack_then_attend},
            packed_bytes + 2 * raw_bytes,
            BLOCK_TOKENS,
            is_peer=False,
        ),
        Way(
            "fixed4:kernel=portable",
            {"kvfold fixed4 portable splits=4": partial(fixed4_portable.attend, q, kv, SCALE, 4)},
            packed_bytes,
            BLOCK_TOKENS,
            is_peer=False,
        ),
    ]


def _gaac_slots(pool: Pool, tokens: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Slots of K and V for so many tokens, and the windows: some pages encoded by the codec, over and over."""
    sides = []
    count = GAAC_PAGES * GAAC_BLOCK_TOKENS // PAGE_TOKENS
    for raw in (pool.raw_k, pool.raw_v):
        slots, windows = inputs.gaac_slots(inputs.patterns_of(raw[:count]), GAAC_BLOCK_TOKENS, device)
        numbers = torch.arange(tokens // GAAC_BLOCK_TOKENS, device=device) % len(slots)
        sides.append((slots[numbers], windows))
    return sides


def _gaac(pool: Pool, sides: list[tuple[torch.Tensor, torch.Tensor]], point: tuple[int, int]) -> list[Way]:
    batch, context = point
    q = _queries(batch, pool)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    (k, k_windows), (v, v_windows) = sides
    table = inputs.uniform_table(batch, context // GAAC_BLOCK_TOKENS, str(q.device))
    kv = GaacKv(k, v, pool.raw_k, pool.raw_v, table, GAAC_BLOCK_TOKENS, k_windows, v_windows)
    launches = {
        f"kvfold gaac portable splits={splits}": partial(gaac_attend.attend, q, kv, SCALE, splits)
        for splits in _splits(batch, context // GAAC_BLOCK_TOKENS, processors, (1, 2, 4))
    }
    size = batch * context // GAAC_BLOCK_TOKENS * (k.shape[1] + v.shape[1])
    return [Way("gaac:kernel=portable", launches, size, GAAC_BLOCK_TOKENS)]


def _splits(batch: int, tiles: int, processors: int, waves: Sequence[int]) -> list[int]:
    """Split counts that fill the GPU about that many programs deep."""
    return sorted({fixed4.split_count(batch, KV_HEADS, tiles, processors * wave) for wave in waves})


def _peers(pool: Pool, fa3_operators: Any, point: tuple[int, int]) -> Iterator[Peer]:
    """torch's backends on dense K and V of the same size, the pools' memory as they want it, and vLLM's kernel."""
    batch, context = point
    q = _queries(batch, pool)
    shape = (batch, KV_HEADS, context, HEAD_DIM)
    k = pool.raw_k.view(-1)[: math.prod(shape)].view(shape)
    v = pool.raw_v.view(-1)[: math.prod(shape)].view(shape)

    def attend(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    yield Peer("torch sdpa cudnn", partial(attend, SDPBackend.CUDNN_ATTENTION), None)
    yield Peer("torch sdpa flash", partial(attend, SDPBackend.FLASH_ATTENTION), None)
    if fa3_operators is not None:
        launch = fa3.attend(fa3_operators, q, pool.raw(batch, context), SCALE)
        yield Peer("vllm fa3", launch, PAGE_TOKENS)


def _checked_fa3(library: Path, pool: Pool) -> Any:
    """Its operators, if they attend as our BF16 kernel does; raises BitsDifferError else."""
    operators = fa3.load(library)
    kv = pool.raw(3, 1024)
    q = _queries(3, pool)
    k, v = (
        side.view(-1, PAGE_TOKENS, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        for side in (kv.raw_k, kv.raw_v)
    )
    expected = bf16.attend(q, replace(kv, raw_k=k, raw_v=v), SCALE, 1)
    error = (fa3.attend(operators, q, kv, SCALE)() - expected).norm() / expected.norm()
    if not error <= FA3_TOLERANCE:
        raise BitsDifferError(f"vllm fa3: differs from our BF16 kernel by {error.item():.2e}")
    return operators


def pack_tasks(device: str) -> Iterator[tuple[str, Iterator[Row]]]:
    """Packing and unpacking of K and V of one layer, from and to raw pages."""
    pool = Pool(max(PACK_BLOCKS) * BLOCK_TOKENS, device, [fused.name for fused in FUSED])
    for fused in FUSED:
        for blocks in PACK_BLOCKS:
            yield f"pack {fused.name} {blocks} blocks", _pack_rows(pool, fused, blocks)


def _pack_rows(pool: Pool, fused: Fused, blocks: int) -> Iterator[Row]:
    listed, places = pool.listed[:blocks].contiguous(), pool.places[:blocks].contiguous()
    (packed_k, packed_v), _ = pool.packed[fused.name]

    def pack_both() -> None:
        fused.pack(pool.raw_k, listed, packed_k, places, "k", BLOCK_TOKENS)
        fused.pack(pool.raw_v, listed, packed_v, places, "v", BLOCK_TOKENS)

    def unpack_both() -> None:
        fused.unpack(packed_k, places, pool.raw_k, listed, "k", BLOCK_TOKENS)
        fused.unpack(packed_v, places, pool.raw_v, listed, "v", BLOCK_TOKENS)

    moved = blocks * (BLOCK_TOKENS * TOKEN_BYTES + pool.block_bytes(fused))
    for op, launch in (("pack", pack_both), ("unpack", unpack_both)):
        yield Row(
            op,
            fused.name,
            f"kvfold {fused.name} {op}",
            *burst(launch),
            bytes=moved,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_tokens=BLOCK_TOKENS,
            tokens=blocks * BLOCK_TOKENS,
        )
