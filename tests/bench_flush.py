"""What a launch finds in the cache, in one run: `PYTHONPATH=. python tests/bench_flush.py [BATCHxCONTEXT ...]`.

For each format the fastest launch, timed behind a reading of other memory (as `kvfold kernels bench` does) and
behind a writing of it (as `triton.testing.do_bench` does). Needs an NVIDIA GPU. Outcomes are in docs/kernels.md.
"""

import math
import sys
from functools import partial

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.kernels import bench
from kvfold.kernels.timing import burst, fastest, graph

POINTS = ("8x65536", "32x8192", "4x32768", "1x131072", "1x65536")
FORMATS = ("bf16", "fixed4", "fixed3")


def main(names: list[str]) -> None:
    points = [tuple(map(int, name.split("x"))) for name in names]
    pool = bench.Pool(max(map(math.prod, points)), "cuda", FORMATS)
    for batch, context in points:
        times: dict[str, tuple[float, float]] = {}
        for way in bench._ways(pool, (batch, context), FORMATS):
            label, launch, _ = fastest(way.launches)
            times[label] = both(launch)
        shape = (batch, bench.KV_HEADS, context, bench.HEAD_DIM)
        k, v = (side.view(-1)[: math.prod(shape)].view(shape) for side in (pool.raw_k, pool.raw_v))
        q = bench._queries(batch, pool)[:, :, None]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            times["torch cudnn"] = both(partial(scaled_dot_product_attention, q, k, v, enable_gqa=True))
        best = [min(pair[kind] for name, pair in times.items() if "fixed" not in name) for kind in range(2)]
        for name, pair in times.items():
            parts = [
                f"{kind} {time:.1f} us {least / time:.3f}x"
                for kind, time, least in zip(("read", "written"), pair, best, strict=True)
            ]
            print(f"{batch} x {context}: {name}: {', '.join(parts)}", flush=True)


def both(launch) -> tuple[float, float]:
    return burst(launch)[0], triton.testing.do_bench(graph(launch), 10, 40, return_mode="median") * 1e3


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1:] or list(POINTS))
