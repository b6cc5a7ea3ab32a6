"""Attention over `fixed3` pages that looks right and is not; every one must fail its check."""

from dataclasses import replace

from kvfold.codec.fixed3 import word_bytes
from kvfold.kernels.fixed3_portable import attend


def _with(kv, start, stop, value):
    """Some bytes of all main parts, counted from their bases on, replaced."""
    start, stop = (word_bytes(kv.pages.block_tokens, kv.pages.head_dim) + at for at in (start, stop))
    packed_k, packed_v = kv.pages.packed_k.clone(), kv.pages.packed_v.clone()
    for mains in (packed_k, packed_v):
        mains[..., start:stop] = value
    return replace(kv, pages=replace(kv.pages, packed_k=packed_k, packed_v=packed_v))


def forgets_exceptions(q, kv, scale, splits):
    d = kv.pages.head_dim
    return attend(q, _with(kv, d, 2 * d, 0), scale, splits)


def forgets_bases(q, kv, scale, splits):
    return attend(q, _with(kv, 0, kv.pages.head_dim, 120), scale, splits)


def takes_values_for_keys(q, kv, scale, splits):
    return attend(q, replace(kv, pages=replace(kv.pages, packed_k=kv.pages.packed_v)), scale, splits)


def takes_pages_out_of_order(q, kv, scale, splits):
    """Attention does not depend on the order, but a skip belongs to the first page."""
    table = kv.pages.table
    pages = table.packed_pages.clone()
    count = int(table.packed_counts[0])
    pages[0, :count] = pages[0, :count].flip(0)
    return attend(
        q, replace(kv, pages=kv.pages.with_table(replace(table, packed_pages=pages))), scale, splits
    )


def reads_one_token_past_the_end(q, kv, scale, splits):
    table = kv.pages.table
    longer = replace(table, raw_tokens=table.raw_tokens + 1)
    return attend(q, replace(kv, pages=kv.pages.with_table(longer)), scale, splits)


KERNELS = (
    forgets_exceptions,
    forgets_bases,
    takes_values_for_keys,
    takes_pages_out_of_order,
    reads_one_token_past_the_end,
)
