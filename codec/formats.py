"""The KV formats by name. A format is one file of this room and one entry here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvfold.codec import bf16, escape, fixed3, fixed4, gaac, tags
from kvfold.codec.pages import TABLE_ENTRY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvfold.codec.packed import Axis, Packed
    from kvfold.codec.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What every format offers. Patterns are BF16, ``uint16 [kv_head, token, head_dim]``."""

    encode: Callable[[NDArray[np.uint16], Windows, int], Packed]  # patterns, windows, block_tokens
    decode: Callable[[Packed], NDArray[np.uint16]]
    mode_counts: Callable[[Packed], dict[str, int]]
    count_exceptions: Callable[[NDArray[np.uint16], Packed], int]
    channel_multiple: int = gaac.GROUP  # head_dim must be a multiple of this
    table_entry_bytes: int = TABLE_ENTRY_BYTES  # per page, in the block table
    block_multiple: int = 1  # block_tokens must be a multiple of this
    block_tokens: int = 64  # what it is measured and used with unless told otherwise
    # Pages have one size, or are raw: the slot needs no slack.
    fixed_size: bool = False
    # The bytes of a page ahead of its lists, where the format has lists: kv_heads, block_tokens, head_dim.
    main_bytes: Callable[[int, int, int], int] | None = None
    plain_bits: int = 8  # of an element, beside its exponent
    # FP8 formats lose bits in a cast: the patterns that come back, and those whose exponents are coded.
    stored: Callable[[NDArray[np.uint16]], NDArray[np.uint16]] = lambda patterns: patterns
    coded: Callable[[NDArray[np.uint16]], NDArray[np.uint16]] = lambda patterns: patterns


def _gaac(group: int = gaac.GROUP, axis: Axis = "channel", two_bit: bool = False) -> Format:
    return Format(
        encode=partial(gaac.encode, axis=axis, group=group, two_bit=two_bit),
        decode=partial(gaac.decode, group=group, two_bit=two_bit),
        mode_counts=partial(gaac.mode_counts, group=group, two_bit=two_bit),
        count_exceptions=gaac.count_exceptions,
        channel_multiple=gaac.GROUP if axis == "token" else max(group, gaac.GROUP),
        block_multiple=max(group, gaac.GROUP) if axis == "token" else 1,
    )


def _fixed4(kind: fixed4.Kind = "k") -> Format:
    return Format(
        encode=partial(fixed4.encode, kind=kind),
        decode=fixed4.decode,
        mode_counts=fixed4.mode_counts,
        count_exceptions=fixed4.count_exceptions,
        channel_multiple=fixed4.CHANNEL_MULTIPLE,
        block_multiple=fixed4.STRIPE_TOKENS,
        block_tokens=fixed4.LARGEST_BLOCK_TOKENS,
        fixed_size=True,
    )


def _fixed3(kind: fixed4.Kind = "k") -> Format:
    return Format(
        encode=partial(fixed3.encode, kind=kind),
        decode=fixed3.decode,
        mode_counts=fixed3.mode_counts,
        count_exceptions=fixed3.count_exceptions,
        channel_multiple=fixed3.CHANNEL_MULTIPLE,
        block_tokens=fixed3.LARGEST_BLOCK_TOKENS,
        main_bytes=fixed3.main_bytes,
    )


def _escape(code_bits: int) -> Format:
    return Format(
        encode=partial(escape.encode, code_bits=code_bits),
        decode=partial(escape.decode, code_bits=code_bits),
        mode_counts=partial(escape.mode_counts, code_bits=code_bits),
        count_exceptions=partial(escape.count_exceptions, code_bits=code_bits),
        channel_multiple=escape.CHANNEL_MULTIPLE,
        main_bytes=partial(escape.main_bytes, code_bits=code_bits),
    )


def _tags(group: int) -> Format:
    return Format(
        encode=partial(tags.encode, group=group),
        decode=partial(tags.decode, group=group),
        mode_counts=partial(tags.mode_counts, group=group),
        count_exceptions=tags.count_exceptions,
        channel_multiple=tags.CHANNEL_MULTIPLE,
        block_multiple=group // tags.CHANNEL_MULTIPLE,
        main_bytes=partial(tags.main_bytes, group=group),
    )


FORMATS: dict[str, Format] = {
    "bf16": Format(
        encode=bf16.encode,
        decode=bf16.decode,
        mode_counts=bf16.mode_counts,
        count_exceptions=bf16.count_exceptions,
        channel_multiple=1,
        table_entry_bytes=bf16.TABLE_ENTRY_BYTES,
        block_tokens=16,
        fixed_size=True,
    ),
    "gaac": _gaac(),
    "gaac-2bit": _gaac(two_bit=True),
    "fixed4": _fixed4(),
    "fixed3": _fixed3(),
    "esc3": _escape(code_bits=3),
    "esc2-2": _escape(code_bits=2),
    "tag8": _tags(group=8),
    "tag32": _tags(group=32),
}


def with_parameters(name: str) -> Format:
    """The BF16 format of a name with parameters: ``gaac:group=16,axis=token``, ``fixed4:kind=v``.

    A name without parameters is the entry of ``FORMATS``. Raises ValueError that names what is allowed.
    """
    base, _, options = name.partition(":")
    if base not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {base!r}")
    if not options:
        return FORMATS[base]
    given = dict(option.partition("=")[::2] for option in options.split(","))
    allowed: dict[str, tuple[str, ...]] = {}
    if base in ("gaac", "gaac-2bit"):
        allowed = {"group": tuple(map(str, gaac.GROUPS)), "axis": ("channel", "token")}
    elif base in ("fixed4", "fixed3"):
        allowed = {"kind": ("k", "v")}
    for key, value in given.items():
        if value not in allowed.get(key, ()):
            rules = "; ".join(f"{key} {', '.join(values)}" for key, values in allowed.items()) or "none"
            raise ValueError(f"parameters of {base} are: {rules}; got {key}={value}")
    if base in ("fixed4", "fixed3"):
        kind: fixed4.Kind = "v" if given["kind"] == "v" else "k"
        return _fixed4(kind) if base == "fixed4" else _fixed3(kind)
    axis: Axis = "token" if given.get("axis") == "token" else "channel"
    return _gaac(int(given.get("group", gaac.GROUP)), axis, two_bit=base == "gaac-2bit")
