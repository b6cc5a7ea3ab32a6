"""Times of attention, packing and linear layers on this GPU: the cost table that the simulator reads.

Both sides of every ratio run in one process, on the same pages in shuffled order, launched from CUDA graphs, with
the cache flushed between launches. Nothing is timed before the gate has passed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.kernels import bf16, fixed4, inputs
from kvfold.kernels.fixed4_pack import pack, slot_bytes
from kvfold.kernels.fixed4_unpack import unpack
from kvfold.kernels.pages import BlockTable, PagedKv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128  # as in Qwen3-8B and Llama-3.1-8B
PAGE_TOKENS = 64
BLOCK_TOKENS = 256
BATCHES = (1, 4, 8, 32, 128, 256)
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
POINTS = (*((b, n) for b in BATCHES for n in CONTEXTS), (32, 8192), (4, 32768))
MOST_KV_BYTES = 32 * 10**9
TOKEN_BYTES = 4 * KV_HEADS * HEAD_DIM  # K and V of one token, BF16
SUSTAINED_POINTS = ((8, 65536), (32, 8192), (1, 131072))
SUSTAINED_S = 2.5
PREFILL = ((512, 512), (2048, 2048), (8192, 8192), (32768, 32768), (512, 8192), (2048, 8192), (2048, 32768))
LINEAR_TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048)
PACK_BLOCKS = (1, 16, 256, 2048)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point of the cost table; None where a column does not apply."""

    op: str
    format: str
    kernel: str
    median_us: float
    p10_us: float | None
    p90_us: float | None
    bytes: int  # that must move, each once
    batch: int | None = None
    context_tokens: int | None = None
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    page_tokens: int | None = None
    tokens: int | None = None
    in_features: int | None = None
    out_features: int | None = None
    weights: str | None = None
    energy_mj: float | None = None
    sustained: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures were measured with."""

    device: str = field(default_factory=lambda: torch.cuda.get_device_name())
    torch: str = torch.__version__
    triton: str = triton.__version__
    driver: str = field(default_factory=lambda: _driver())


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlSystemGetDriverVersion()


def _graph(launch: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def burst(
    launch: Callable[[], object], warmup_ms: int = 10, repeat_ms: int = 40
) -> tuple[float, float, float]:
    """Median, 10 % and 90 % quantile of one launch from a graph, in microseconds."""
    median, p10, p90 = triton.testing.do_bench(
        _graph(launch), warmup=warmup_ms, rep=repeat_ms, quantiles=[0.5, 0.1, 0.9]
    )
    return median * 1e3, p10 * 1e3, p90 * 1e3


def sustained(launch: Callable[[], object], seconds: float = SUSTAINED_S) -> tuple[float, float]:
    """Mean microseconds and millijoules of one launch, back to back, from NVML's energy counter."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    replay = _graph(launch)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds / 3:  # let the clock settle under the power cap
        replay()
        torch.cuda.synchronize()
    count, start, energy = 0, time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    while time.perf_counter() - start < seconds:
        for _ in range(100):
            replay()
        torch.cuda.synchronize()
        count += 100
    elapsed = time.perf_counter() - start
    energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - energy
    return elapsed / count * 1e6, energy / count


class Pool:
    """Pages for the largest point, filled once; every point is a table into them."""

    def __init__(self, tokens: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        pages = tokens // PAGE_TOKENS
        shape = (pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        self.raw_k = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.raw_v = torch.empty_like(self.raw_k)
        for start in range(0, pages, 2048):
            part = (min(2048, pages - start), *shape[1:])
            self.raw_k[start : start + 2048] = inputs.keys(part, generator)
            self.raw_v[start : start + 2048] = inputs.values(part, generator)
        self.blocks = tokens // BLOCK_TOKENS
        self.packed_k = torch.zeros(
            (self.blocks, KV_HEADS, slot_bytes(BLOCK_TOKENS, HEAD_DIM)), dtype=torch.uint8, device=device
        )
        self.packed_v = torch.zeros_like(self.packed_k)
        self.listed = torch.arange(pages, dtype=torch.int32, device=device).view(self.blocks, -1)
        self.places = torch.arange(self.blocks, dtype=torch.int32, device=device)
        self.exceptions = [
            pack(raw, self.listed, records, self.places, kind, BLOCK_TOKENS)
            for kind, raw, records in (("k", self.raw_k, self.packed_k), ("v", self.raw_v, self.packed_v))
        ]

    def kv(self, batch: int, context_tokens: int) -> tuple[PagedKv, PagedKv]:
        """Packed pages, and the same tokens as raw pages, in one shuffled order."""
        table = inputs.uniform_table(batch, context_tokens // BLOCK_TOKENS, str(self.places.device))
        zeros = torch.zeros_like(table.packed_counts)
        raw = BlockTable(
            packed_pages=table.packed_pages,
            packed_counts=zeros,
            raw_pages=self.listed[table.packed_pages.long()].view(batch, -1).contiguous(),
            raw_tokens=zeros + context_tokens,
            packed_skips=zeros,
            raw_skips=zeros,
        )
        kv = PagedKv(self.packed_k, self.packed_v, self.raw_k, self.raw_v, table, BLOCK_TOKENS)
        return kv, kv.with_table(raw)


def attend_rows(points: Sequence[tuple[int, int]], device: str) -> Iterator[Row]:
    """Attention at every point that fits: our kernels at their best split, and torch's backends."""
    points = [point for point in points if math.prod(point) * TOKEN_BYTES <= MOST_KV_BYTES]
    pool = Pool(max(math.prod(point) for point in points), device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for batch, context in points:
        kv, raw = pool.kv(batch, context)
        q = inputs.queries(batch, KV_HEADS * GROUP, HEAD_DIM, torch.Generator(device).manual_seed(1))
        shape: dict[str, Any] = {
            "batch": batch,
            "context_tokens": context,
            "q_heads": KV_HEADS * GROUP,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        }
        raw_bytes = batch * context * TOKEN_BYTES
        blocks = batch * context // BLOCK_TOKENS
        packed_bytes = 2 * blocks * KV_HEADS * slot_bytes(BLOCK_TOKENS, HEAD_DIM)
        for name, size, best in (
            ("bf16", raw_bytes, _best_bf16(q, raw, context, processors)),
            ("fixed4", packed_bytes, _best_fixed4(q, kv, context, processors)),
        ):
            label, launch, times = best
            page = PAGE_TOKENS if name == "bf16" else BLOCK_TOKENS
            yield Row("attend", name, label, *times, bytes=size, page_tokens=page, **shape)
            if (batch, context) in SUSTAINED_POINTS:
                mean_us, energy_mj = sustained(launch)
                yield Row(
                    "attend",
                    name,
                    label,
                    mean_us,
                    None,
                    None,
                    bytes=size,
                    page_tokens=page,
                    energy_mj=energy_mj,
                    sustained=1,
                    **shape,
                )
        for label, times in _sdpa(q, pool, batch, context):
            yield Row("attend", "bf16", label, *times, bytes=raw_bytes, **shape)


def _splits(batch: int, tiles: int, processors: int, waves: Sequence[int]) -> list[int]:
    """Split counts that fill the GPU about that many programs deep."""
    return sorted({fixed4.split_count(batch, KV_HEADS, tiles, processors * wave) for wave in waves})


Best = tuple[str, "Callable[[], object]", tuple[float, float, float]]  # label, launch, its times


def _fastest(launches: Mapping[str, Callable[[], object]]) -> Best:
    timed = {label: burst(launch) for label, launch in launches.items()}
    label = min(timed, key=lambda name: timed[name][0])
    return label, launches[label], timed[label]


def _best_bf16(q: torch.Tensor, raw: PagedKv, context: int, processors: int) -> Best:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    launches = {}
    for tile, stages in ((64, 4), (64, 3), (128, 3)):
        for splits in _splits(len(q), context // tile, processors, (1, 2, 4)):
            launches[f"kvfold bf16 tile={tile} stages={stages} splits={splits}"] = partial(
                bf16.attend, q, raw, HEAD_DIM**-0.5, splits, out, tile, stages
            )
    return _fastest(launches)


def _best_fixed4(q: torch.Tensor, kv: PagedKv, context: int, processors: int) -> Best:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    return _fastest(
        {
            f"kvfold fixed4 splits={splits}": partial(fixed4.attend, q, kv, HEAD_DIM**-0.5, splits, out)
            for splits in _splits(len(q), context // BLOCK_TOKENS, processors, (1, 2, 4))
        }
    )


def _sdpa(
    q: torch.Tensor, pool: Pool, batch: int, context: int
) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """torch's backends on dense K and V of the same size: the pools' memory, as they want it."""
    shape = (batch, KV_HEADS, context, HEAD_DIM)
    k = pool.raw_k.view(-1)[: math.prod(shape)].view(shape)
    v = pool.raw_v.view(-1)[: math.prod(shape)].view(shape)
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                yield (
                    f"torch sdpa {name}",
                    burst(partial(scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)),
                )
        except RuntimeError:
            continue  # a backend that refuses the shape has no row


def prefill_rows(device: str) -> Iterator[Row]:
    """torch's best attention of a prompt chunk: causal over itself, or dense over its history."""
    for tokens, context in PREFILL:
        generator = torch.Generator(device).manual_seed(2)
        q = inputs.values((1, KV_HEADS * GROUP, tokens, HEAD_DIM), generator)
        k, v = (make((1, KV_HEADS, context, HEAD_DIM), generator) for make in (inputs.keys, inputs.values))
        best: tuple[str, tuple[float, float, float]] | None = None
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(backend):
                times = burst(
                    partial(
                        scaled_dot_product_attention, q, k, v, is_causal=tokens == context, enable_gqa=True
                    )
                )
            if best is None or times[0] < best[1][0]:
                best = (f"torch sdpa {name} {'causal' if tokens == context else 'dense'}", times)
        assert best is not None
        yield Row(
            "prefill",
            "bf16",
            best[0],
            *best[1],
            bytes=context * TOKEN_BYTES + 4 * tokens * KV_HEADS * GROUP * HEAD_DIM,
            batch=1,
            context_tokens=context,
            q_heads=KV_HEADS * GROUP,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            tokens=tokens,
        )


def pack_rows(device: str) -> Iterator[Row]:
    """Packing and unpacking of K and V of one layer, from and to raw pages."""
    pool = Pool(max(PACK_BLOCKS) * BLOCK_TOKENS, device)
    out = torch.empty_like(pool.raw_k)
    for blocks in PACK_BLOCKS:
        listed, places = pool.listed[:blocks].contiguous(), pool.places[:blocks].contiguous()
        sides = (("k", pool.raw_k, pool.packed_k), ("v", pool.raw_v, pool.packed_v))

        def pack_both(listed=listed, places=places, sides=sides) -> None:
            for kind, raw, records in sides:
                pack(raw, listed, records, places, kind, BLOCK_TOKENS)

        def unpack_both(listed=listed, places=places, sides=sides) -> None:
            for kind, _, records in sides:
                unpack(records, places, out, listed, kind, BLOCK_TOKENS)

        moved = blocks * (BLOCK_TOKENS * TOKEN_BYTES + 2 * KV_HEADS * slot_bytes(BLOCK_TOKENS, HEAD_DIM))
        for op, launch in (("pack", pack_both), ("unpack", unpack_both)):
            yield Row(
                op,
                "fixed4",
                f"kvfold fixed4 {op}",
                *burst(launch),
                bytes=moved,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                page_tokens=BLOCK_TOKENS,
                tokens=blocks * BLOCK_TOKENS,
            )


def linear_rows(shapes: Sequence[tuple[int, int]], device: str) -> Iterator[Row]:
    """BF16 products of ``tokens`` rows with weights ``[out_features, in_features]``."""
    for in_features, out_features in shapes:
        weights = torch.randn(out_features, in_features, device=device).to(torch.bfloat16)
        for tokens in LINEAR_TOKENS:
            x = torch.randn(tokens, in_features, device=device).to(torch.bfloat16)
            yield Row(
                "linear",
                "bf16",
                "torch matmul",
                *burst(partial(torch.matmul, x, weights.t()), 4, 12),
                bytes=2 * (in_features * out_features + tokens * (in_features + out_features)),
                tokens=tokens,
                in_features=in_features,
                out_features=out_features,
                weights="bf16",
            )


COLUMNS = (
    "device",
    *("op", "format", "batch", "context_tokens", "q_heads", "kv_heads", "head_dim", "page_tokens", "tokens"),
    *("in_features", "out_features", "weights", "median_us", "p10_us", "p90_us", "bytes", "energy_mj"),
    *("sustained", "kernel", "torch", "triton", "driver", "commit", "date"),
)


def as_columns(row: Row, machine: Machine, commit: str, date: str) -> dict[str, object]:
    """A row of the CSV: times to 0.01 microseconds, empty where a column does not apply."""
    values: dict[str, object] = {"commit": commit, "date": date}
    for source in (row, machine):
        for column in fields(source):
            value = getattr(source, column.name)
            if isinstance(value, float):
                value = f"{value:.2f}"
            values[column.name] = "" if value is None else value
    return {name: values[name] for name in COLUMNS}
