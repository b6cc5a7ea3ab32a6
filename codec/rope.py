"""Keys rotated to later positions: calibration for positions that no calibration text reached.

RoPE moves the exponents of keys with position, but ``R(p + d) = R(d) R(p)``: keys cached at one position show,
rotated by d, what they would have been d positions later. Values do not depend on position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from kvfold.codec.windows import rotate_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

# `half` turns channels (i, i + rotary_dim / 2), as Hugging Face and GPT-NeoX do; `interleaved` (2 i, 2 i + 1).
Layout = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True)
class Rope:
    """A model's rotary embedding.

    Pair i of the first ``rotary_dim`` channels (None: of all) turns by ``theta ** (-2 i / rotary_dim)`` per
    position; channels after them do not turn.
    """

    theta: float
    layout: Layout = "half"
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ValueError(f"rope theta must be above 1, got {self.theta}")
        if self.layout not in get_args(Layout):
            raise ValueError(f"rope layout must be one of {', '.join(get_args(Layout))}, got {self.layout!r}")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"rotary_dim must be even and at least 2, got {self.rotary_dim}")


def rotate(keys: NDArray[np.uint16], by_tokens: int, rope: Rope) -> NDArray[np.uint16]:
    """BF16 keys ``[..., head_dim]`` after RoPE, as if each stood ``by_tokens`` positions later.

    Raises ValueError for an odd number of rotary channels, for fewer channels than those, and for keys that
    are not finite.
    """
    head_dim = keys.shape[-1]
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be at most head_dim {head_dim}, got {rotary_dim}")
    turning, still = keys[..., :rotary_dim], keys[..., rotary_dim:]
    if rope.layout == "half":
        turned = rotate_keys(turning, by_tokens, rope.theta)
    else:
        halves = np.concatenate([turning[..., ::2], turning[..., 1::2]], axis=-1)
        first, second = np.split(rotate_keys(halves, by_tokens, rope.theta), 2, axis=-1)
        turned = np.stack([first, second], axis=-1).reshape(turning.shape)
    return np.concatenate([turned, still], axis=-1)


def rotations(tokens: int, rotate_to_tokens: int, every_tokens: int | None = None) -> tuple[int, ...]:
    """By how many tokens to rotate keys of positions ``0..tokens - 1`` so that copies reach ``rotate_to_tokens``.

    Multiples of ``every_tokens`` (of ``tokens`` unless given), and the one that ends exactly there. Raises
    ValueError when the keys reach further already.
    """
    every = tokens if every_tokens is None else every_tokens
    if every < 1 or rotate_to_tokens < tokens:
        raise ValueError(
            f"keys of {tokens} tokens can be rotated to at least {tokens} tokens, by steps of at least 1, "
            f"got {rotate_to_tokens} by steps of {every}"
        )
    last = rotate_to_tokens - tokens
    return tuple(sorted({*range(every, last + 1, every), last} - {0}))
