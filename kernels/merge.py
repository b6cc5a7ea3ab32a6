"""Merge the parts of a split attention: one program per query head."""

import torch
import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    part_ptr,  # float32 [batch, kv_head, split, ROWS, HEAD_DIM], each part normalised by its own sum
    lse_ptr,  # float32 [batch, kv_head, split, ROWS], log2 of each part's sum of exponentials
    out_ptr,  # [batch, kv_head * GROUP, HEAD_DIM]
    split_count,
    SPLIT_TILE: tl.constexpr,  # power of two that holds all splits
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP padded to the tile of the attention kernel
    HEAD_DIM: tl.constexpr,
):
    kv = tl.program_id(0)  # batch * kv_heads + kv_head
    row = tl.program_id(1)
    split = tl.arange(0, SPLIT_TILE)
    channel = tl.arange(0, HEAD_DIM)
    part = (kv * split_count + split) * ROWS + row
    lse = tl.load(lse_ptr + part, mask=split < split_count, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    parts = tl.load(
        part_ptr + part[:, None] * HEAD_DIM + channel[None, :], mask=split[:, None] < split_count, other=0.0
    )
    # An empty split has weight 0 and wrote nothing that counts.
    merged = tl.sum(tl.where(weight[:, None] > 0, parts * weight[:, None], 0.0), 0)
    tl.store(out_ptr + (kv * GROUP + row) * HEAD_DIM + channel, merged.to(out_ptr.dtype.element_ty))


def empty_parts(q: torch.Tensor, rows_per_sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts ``float32 [batch * rows_per_sequence, head_dim]`` and their log2 sums ``[...]``."""
    rows = len(q) * rows_per_sequence
    parts = torch.empty((rows, q.shape[2]), dtype=torch.float32, device=q.device)
    return parts, torch.empty(rows, dtype=torch.float32, device=q.device)
