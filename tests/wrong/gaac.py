"""Attention over `gaac` pages that looks right and is not; every one must fail its check."""

from dataclasses import replace

import torch

from kvfold.kernels.gaac_attend import attend


def forgets_the_tail(q, kv, scale, splits, out):
    tokens = kv.table.raw_tokens // kv.raw_page_tokens * kv.raw_page_tokens
    return attend(q, kv.with_table(replace(kv.table, raw_tokens=tokens)), scale, splits, out)


def reads_one_token_past_the_end(q, kv, scale, splits, out):
    return attend(q, kv.with_table(replace(kv.table, raw_tokens=kv.table.raw_tokens + 1)), scale, splits, out)


def forgets_the_windows(q, kv, scale, splits, out):
    return attend(q, replace(kv, windows_k=kv.windows_k * 0, windows_v=kv.windows_v * 0), scale, splits, out)


def takes_every_window_for_narrow(q, kv, scale, splits, out):
    narrow_k, narrow_v = (windows[:1].repeat(2, 1, 1) for windows in (kv.windows_k, kv.windows_v))
    return attend(q, replace(kv, windows_k=narrow_k, windows_v=narrow_v), scale, splits, out)


def takes_pages_out_of_order(q, kv, scale, splits, out):
    """Attention does not depend on the order, but a skip belongs to the first page."""
    pages = kv.table.packed_pages.clone()
    for b, count in enumerate(kv.table.packed_counts.tolist()):
        pages[b, :count] = pages[b, :count].flip(0)
    return attend(q, kv.with_table(replace(kv.table, packed_pages=pages)), scale, splits, out)


def ignores_the_window(q, kv, scale, splits, out):
    table = replace(kv.table, packed_skips=kv.table.packed_skips * 0)
    return attend(q, kv.with_table(table), scale, splits, out)


def gives_every_head_the_first(q, kv, scale, splits, out):
    attend(q, kv, scale, splits, out)
    return out.copy_(out[:, :1].expand_as(out).clone())


def writes_before_the_start(q, kv, scale, splits, out):
    attend(q, kv, scale, splits, out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1)[0] = 0
    return out


KERNELS = (
    forgets_the_tail,
    reads_one_token_past_the_end,
    forgets_the_windows,
    takes_every_window_for_narrow,
    takes_pages_out_of_order,
    ignores_the_window,
    gives_every_head_the_first,
    writes_before_the_start,
)
