"""FP8 attention that looks right and is not; every one must fail its check."""

from dataclasses import replace

import torch

from kvfold.kernels.fp8 import attend


def forgets_the_tail(q, kv, scale, splits, out, **scales):
    page = kv.raw_page_tokens
    tokens = torch.clamp(kv.table.raw_tokens // page * page, min=1)
    return attend(q, kv.with_table(replace(kv.table, raw_tokens=tokens)), scale, splits, out, **scales)


def reads_one_token_past_the_end(q, kv, scale, splits, out, **scales):
    table = replace(kv.table, raw_tokens=kv.table.raw_tokens + 1)
    return attend(q, kv.with_table(table), scale, splits, out, **scales)


def starts_the_window_a_token_early(q, kv, scale, splits, out, **scales):
    table = replace(kv.table, raw_skips=torch.clamp(kv.table.raw_skips - 1, min=0))
    return attend(q, kv.with_table(table), scale, splits, out, **scales)


def takes_values_by_token(q, kv, scale, splits, out, **scales):
    bits = kv.raw_v.view(torch.uint8)
    mixed = bits.transpose(2, 3).contiguous().view(bits.shape).view(kv.raw_v.dtype)
    return attend(q, replace(kv, raw_v=mixed), scale, splits, out, **scales)


def forgets_the_scale_of_values(q, kv, scale, splits, out, k_scale, v_scale):
    return attend(q, kv, scale, splits, out, k_scale)


def rounds_the_result_to_bf16(q, kv, scale, splits, out, **scales):
    return out.copy_(attend(q, kv, scale, splits, **scales).to(torch.bfloat16))


def writes_past_the_end(q, kv, scale, splits, out, **scales):
    attend(q, kv, scale, splits, out, **scales)
    torch.as_strided(out, (out.numel() + 1,), (1,))[-1] = 0
    return out


KERNELS = (
    forgets_the_tail,
    reads_one_token_past_the_end,
    starts_the_window_a_token_early,
    takes_values_by_token,
    forgets_the_scale_of_values,
    rounds_the_result_to_bf16,
    writes_past_the_end,
)
