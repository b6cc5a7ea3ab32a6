"""FlashAttention 3 as vLLM ships it: the kernel of the public H200 times, as one more BF16 peer of `bench`.

Its library, ``vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so`` of a vLLM wheel, is opened by itself; vLLM need not be
installed, but torch has to be the version that the wheel was built for. Written for vLLM 0.24.0.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvfold.kernels.pages import PagedKv

#: What vLLM compiles CUDA graphs with (`flash_attn_max_num_splits_for_cuda_graph`).
MOST_SPLITS = 32


def load(path: Path) -> Any:
    """The operators of the library; raises OSError where it cannot be opened with this torch."""
    torch.ops.load_library(str(path))
    return torch.ops._vllm_fa3_C


def attend(operators: Any, q: torch.Tensor, kv: PagedKv, scale: float) -> Callable[[], torch.Tensor]:
    """A launch of decode attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over raw pages, BF16 as ``q``.

    The kernel takes pages ``[page, token, kv_head, head_dim]`` and gets the memory of ours as that: the same
    bytes, tokens and heads of a page exchanged. The work is divided before, as vLLM does once per step.
    """
    batch, q_heads, head_dim = q.shape
    page_tokens = kv.raw_page_tokens
    k, v = (pool.view(-1, page_tokens, kv.kv_heads, head_dim) for pool in (kv.raw_k, kv.raw_v))
    tokens, table = kv.table.raw_tokens, kv.table.raw_pages
    most_tokens = int(tokens.max())
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    plan = operators.get_scheduler_metadata(
        batch,
        1,  # most new tokens of a sequence
        most_tokens,
        q_heads,
        kv.kv_heads,
        head_dim,
        head_dim,
        q.dtype,
        tokens,
        starts,
        *(None, None, None, None),  # lengths of K, of new K, of used Q; padding to the left
        page_tokens,
        0,  # new tokens of K
        True,  # causal
        *(-1, -1),  # no window
        False,  # no cap of the scores
        MOST_SPLITS,
        None,  # query heads of a group together: its choice
        0,  # multiprocessors left to others
    )
    return partial(_launch, operators, q, k, v, starts, tokens, most_tokens, table, scale, plan)


def _launch(
    operators: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    most_tokens: int,
    table: torch.Tensor,
    scale: float,
    plan: torch.Tensor,
) -> torch.Tensor:
    out: torch.Tensor = operators.fwd(
        q,
        k,
        v,
        *(None, None, None, None),  # new K, new V, Q of V, where to write
        starts,
        *(None, None, None),  # lengths of K, of new K, of used Q
        tokens,
        1,
        most_tokens,
        table,
        *(None, None, None, None, None),  # batch of each table row, padding, rotary embedding
        *(None, None, None),  # scales of FP8
        scale,
        True,
        *(-1, -1),
        0.0,
        True,
        plan,
        MOST_SPLITS,
        None,
        0,
        None,  # sinks
        *(1, 0, None),  # no context parallelism
    )[0]
    return out
