"""Attention over `fixed4` pages that looks right and is not; every one must fail its check."""

from dataclasses import replace

from kvfold.kernels.fixed4_portable import attend

LIST_BYTES = 64  # of exceptions, up to 128 channels


def forgets_exceptions(q, kv, scale, splits):
    packed_k, packed_v = kv.packed_k.clone(), kv.packed_v.clone()
    count = kv.block_tokens * kv.head_dim * 3 // 2 + LIST_BYTES + kv.head_dim
    for records in (packed_k, packed_v):
        records[..., count : count + 4] = 0
    return attend(q, replace(kv, packed_k=packed_k, packed_v=packed_v), scale, splits)


def forgets_bases(q, kv, scale, splits):
    start = kv.block_tokens * kv.head_dim * 3 // 2 + LIST_BYTES
    packed_v = kv.packed_v.clone()
    packed_v[..., start : start + kv.head_dim] = 100
    return attend(q, replace(kv, packed_v=packed_v), scale, splits)


def takes_values_for_keys(q, kv, scale, splits):
    return attend(q, replace(kv, packed_k=kv.packed_v), scale, splits)


def takes_pages_out_of_order(q, kv, scale, splits):
    """Attention does not depend on the order, but a skip belongs to the first page."""
    count = int(kv.table.packed_counts[0])
    pages = kv.table.packed_pages.clone()
    pages[0, :count] = pages[0, :count].flip(0)
    return attend(q, kv.with_table(replace(kv.table, packed_pages=pages)), scale, splits)


def reads_one_token_past_the_end(q, kv, scale, splits):
    table = replace(kv.table, raw_tokens=kv.table.raw_tokens + 1)
    return attend(q, kv.with_table(table), scale, splits)


KERNELS = (
    forgets_exceptions,
    forgets_bases,
    takes_values_for_keys,
    takes_pages_out_of_order,
    reads_one_token_past_the_end,
)
