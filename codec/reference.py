"""A slow decoder of `gaac`, written from the layout alone and meant to be read: what fast ones must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.packed import Packed


def decode_gaac(packed: Packed) -> NDArray[np.uint16]:
    """Patterns ``uint16 [kv_head, token, head_dim]`` of pages that are known to be good."""
    if packed.windows is None:
        raise ValueError("gaac pages need the windows that they were packed with, got None")
    kv_heads, tokens, head_dim = packed.shape
    block_tokens = packed.block_tokens
    head_elements = block_tokens * head_dim
    tag_bytes = (head_elements // 8 + 3) // 4
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * block_tokens :] = packed.tail

    for page in range(packed.page_count):
        data = packed.pages[packed.page_starts[page] : packed.page_starts[page + 1]].tobytes()
        signs_start = 4 * kv_heads
        tags_start = signs_start + kv_heads * head_elements
        for head in range(kv_heads):
            payload = int.from_bytes(data[4 * head : 4 * head + 4], "little")
            for group in range(head_elements // 8):
                tag = (data[tags_start + head * tag_bytes + group // 4] >> (2 * (group % 4))) & 3
                width, bases = {
                    0: (3, packed.windows.narrow_base),
                    1: (4, packed.windows.wide_base),
                    2: (8, np.zeros_like(packed.windows.wide_base)),
                }[tag]
                codes = int.from_bytes(data[payload : payload + width], "little")
                payload += width
                for lane in range(8):
                    element = group * 8 + lane
                    if packed.axis == "channel":
                        token, channel = divmod(element, head_dim)
                    else:
                        channel, token = divmod(element, block_tokens)
                    code = (codes >> (lane * width)) % 2**width
                    exponent = code + int(bases[head, channel])
                    sign_mantissa = data[signs_start + head * head_elements + element]
                    sign, mantissa = divmod(sign_mantissa, 128)
                    patterns[head, page * block_tokens + token, channel] = (
                        sign * 2**15 + exponent * 2**7 + mantissa
                    )
    return patterns
