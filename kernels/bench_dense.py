"""Times of what a step does beside decode attention: attention of prompt chunks, and linear layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.kernels import inputs, w4a16
from kvfold.kernels.bench_pages import GROUP, HEAD_DIM, KV_HEADS, TOKEN_BYTES
from kvfold.kernels.timing import BitsDifferError, Row, burst, fastest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvfold.kernels.timing import Times

# (tokens of a chunk, tokens it attends to); chunks alone, then with a history.
PREFILL = (
    *((tokens, tokens) for tokens in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192, 32768)),
    *((tokens, context) for tokens in (1, 4, 16, 64, 256, 512, 2048) for context in (8192, 32768)),
)
LINEAR_TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048)
MOST_FUSED_TOKENS, LEAST_UNPACKED_TOKENS = 64, 32  # where the two ways with 4-bit weights cross
LINEAR_TOLERANCE = 2.0**-8  # outputs are rounded to BF16, 2^-9; so are unpacked weights


def prefill_tasks(device: str) -> Iterator[tuple[str, Iterator[Row]]]:
    """torch's best attention of a prompt chunk: causal over itself, or dense over its history."""
    for tokens, context in PREFILL:
        yield f"prefill {tokens} of {context}", _prefill(tokens, context, device)


def _prefill(tokens: int, context: int, device: str) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(2)
    q = inputs.values((1, KV_HEADS * GROUP, tokens, HEAD_DIM), generator)
    k, v = (make((1, KV_HEADS, context, HEAD_DIM), generator) for make in (inputs.keys, inputs.values))
    best: tuple[str, Times] | None = None
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                times = burst(
                    partial(
                        scaled_dot_product_attention, q, k, v, is_causal=tokens == context, enable_gqa=True
                    )
                )
        except RuntimeError:
            continue  # cuDNN takes no single key
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


def linear_tasks(shapes: Sequence[tuple[int, int]], device: str) -> Iterator[tuple[str, Iterator[Row]]]:
    """Products of ``tokens`` rows with weights of each (in_features, out_features), in BF16 and in 4 bits."""
    check_w4a16(device)
    for in_features, out_features in shapes:
        name = f"linear {in_features} to {out_features}"
        yield name, _linear_bf16(in_features, out_features, device)
        yield f"{name} w4a16", _linear_w4a16(in_features, out_features, device)


def _linear_bf16(in_features: int, out_features: int, device: str) -> Iterator[Row]:
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


def _linear_w4a16(in_features: int, out_features: int, device: str) -> Iterator[Row]:
    """Our kernel, or unpacking and torch's product where that is faster; torch's int4 kernel at one token."""
    weights = random_weights(in_features, out_features, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    groups = in_features // w4a16.GROUP_INPUTS
    weight_bytes = in_features * out_features // 2 + 4 * groups * out_features
    for tokens in LINEAR_TOKENS:
        x = torch.randn(tokens, in_features, device=device).to(torch.bfloat16)
        launches: dict[str, Callable[[], torch.Tensor]] = {}
        if tokens <= MOST_FUSED_TOKENS:
            rows = w4a16.TILE_ROWS[0 if tokens <= w4a16.TILE_ROWS[0] else 1]
            programs = out_features // w4a16.TILE_COLUMNS * -(-tokens // rows)
            for splits in sorted({min(groups, max(1, wave * processors // programs)) for wave in (2, 4)}):
                label = f"kvfold w4a16 rows={rows} splits={splits}"
                launches[label] = partial(w4a16.linear, x, weights, rows, splits)
        if tokens >= LEAST_UNPACKED_TOKENS:
            launches["kvfold w4a16 unpack, then torch matmul"] = partial(_unpack_then_matmul, x, weights)
        if tokens == 1:
            launches["torch _weight_int4pack_mm"] = _torch_int4(x, out_features)
        label, _, times = fastest(launches, 12)
        yield Row(
            "linear",
            "bf16",
            label,
            *times,
            bytes=weight_bytes + 2 * tokens * (in_features + out_features),
            tokens=tokens,
            in_features=in_features,
            out_features=out_features,
            weights="w4a16",
        )


def random_weights(in_features: int, out_features: int, device: str) -> w4a16.Weights:
    """Weights with uniform codes, as 4-bit quantization that uses its range has them."""
    generator = torch.Generator(device).manual_seed(3)
    shape = (in_features // 8, out_features)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, device=device, dtype=torch.int64)
    groups = (in_features // w4a16.GROUP_INPUTS, out_features)
    scales, zeros = (torch.rand(groups, generator=generator, device=device) for _ in range(2))
    return w4a16.Weights(words.to(torch.int32), (0.001 + 0.01 * scales).half(), (7 + 2 * zeros).half())


def check_w4a16(device: str) -> None:
    """Raise BitsDifferError where a product with 4-bit weights is further from float64 than BF16 outputs allow."""
    weights = random_weights(1024, 512, device)
    codes = weights.words[:, None] >> (4 * torch.arange(8, device=device))[:, None] & 15  # [row, place, out]
    by_group = codes.view(-1, w4a16.WORD_ROWS, 8, 512).transpose(1, 2).double()
    exact = (by_group - weights.zeros.double()[:, None, None]) * weights.scales.double()[:, None, None]
    dense = exact.reshape(1024, 512)
    for tokens in (1, 70):
        x = torch.randn(tokens, 1024, generator=torch.Generator(device).manual_seed(4), device=device)
        x = x.to(torch.bfloat16)
        expected = x.double() @ dense
        for rows in w4a16.TILE_ROWS:
            for splits in (1, 3):
                result = w4a16.linear(x, weights, rows, splits)
                error = ((result.double() - expected).norm() / expected.norm()).item()
                if not error < LINEAR_TOLERANCE:
                    raise BitsDifferError(f"w4a16 rows={rows} splits={splits}: error {error:.2e}")
    error = ((w4a16.unpack(weights).double() - dense).norm() / dense.norm()).item()
    if not error < LINEAR_TOLERANCE:
        raise BitsDifferError(f"w4a16 unpack: error {error:.2e}")


def _unpack_then_matmul(x: torch.Tensor, weights: w4a16.Weights) -> torch.Tensor:
    return torch.matmul(x, w4a16.unpack(weights))


def _torch_int4(x: torch.Tensor, out_features: int) -> Callable[[], torch.Tensor]:
    """torch's kernel on weights of this size; a product at one token is what it is made for."""
    in_features = x.shape[1]
    codes = torch.randint(0, 256, (out_features, in_features // 2), device=x.device, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(in_features // w4a16.GROUP_INPUTS, out_features, 2, device=x.device).to(x.dtype)
    return partial(torch.ops.aten._weight_int4pack_mm, x, packed, w4a16.GROUP_INPUTS, scales)
