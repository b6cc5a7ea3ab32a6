"""Attention that looks right on easy inputs and is not; every one must fail its test."""

import torch

from kvfold.kernels import bf16


def does_nothing(q, kv, scale, splits, out):
    return out


def forgets_the_tail(q, kv, scale, splits, out):
    page = kv.raw_page_tokens
    kv.table.raw_tokens.copy_(torch.clamp(kv.table.raw_tokens // page * page, min=1))
    return bf16.attend(q, kv, scale, splits, out)


def ignores_the_window(q, kv, scale, splits, out):
    kv.table.raw_skips.zero_()
    return bf16.attend(q, kv, scale, splits, out)


def takes_pages_in_memory_order(q, kv, scale, splits, out):
    count = kv.table.raw_pages.shape[1]
    kv.table.raw_pages.copy_(torch.arange(count, dtype=torch.int32).expand_as(kv.table.raw_pages))
    return bf16.attend(q, kv, scale, splits, out)


def reads_one_token_past_the_end(q, kv, scale, splits, out):
    kv.table.raw_tokens.add_(1)
    return bf16.attend(q, kv, scale, splits, out)


def gives_every_head_the_first(q, kv, scale, splits, out):
    bf16.attend(q, kv, scale, splits, out)
    out.copy_(out[:, :1].expand_as(out).clone())
    return out


def scales_twice(q, kv, scale, splits, out):
    return bf16.attend(q, kv, scale * scale, splits, out)


KERNELS = (
    does_nothing,
    forgets_the_tail,
    ignores_the_window,
    takes_pages_in_memory_order,
    reads_one_token_past_the_end,
    gives_every_head_the_first,
    scales_twice,
)
