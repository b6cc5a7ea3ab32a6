"""Formats by their full names: `gaac`, `fp8-e4m3`, stacked `esc3+fp8-e4m3`, with parameters after a colon.

    NAME[:PARAMETER=VALUE,...]      a format, `gaac:group=16,axis=token`
    NAME+FP8                        a lossless format on top of a cast, `gaac+fp8-e5m2:scale=amax`

FP8 formats take ``scale``: a number, or ``amax``, which maps the largest finite magnitude of the packed array to
the largest FP8 value. Without it the scale is 1. Only names without parameters carry FORMAT.md's promise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfold.codec import fp8, gaac, stacked
from kvfold.codec.formats import FORMATS, Format, with_parameters
from kvfold.codec.fp8 import E4M3, E5M2, Fp8

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvfold.codec.packed import Packed
    from kvfold.codec.windows import Windows

CASTS = {kind.name: kind for kind in (E4M3, E5M2)}
# The lossless formats that go on top of a cast.
STACKABLE = {
    name: stacked.Coder(FORMATS[name].encode, FORMATS[name].decode, e4m3_wide_base, tag_group)
    for name, e4m3_wide_base, tag_group in (("gaac", 1, gaac.GROUP), ("esc3", 0, 0), ("esc2-2", 0, 0))
}


def known_names() -> list[str]:
    """Every name without parameters."""
    stacks = [f"{coder}+{cast}" for coder in STACKABLE for cast in CASTS]
    return [*FORMATS, *CASTS, *stacks]


def split_names(text: str) -> list[str]:
    """Names from a comma-separated list, in which parameters are comma-separated too: `all` means every name."""
    if text == "all":
        return known_names()
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def cast_of(name: str) -> str:
    """The cast in a format's name, parameters included: windows and FP8 values belong to it; empty for BF16."""
    base, colon, options = name.partition(":")
    cast = base.rpartition("+")[2]
    return cast + colon + options if cast in CASTS else ""


def find_format(name: str) -> Format:
    """The format of a name over BF16 patterns; ValueError that says what is known."""
    base = name.partition(":")[0]
    if base not in known_names():
        raise ValueError(f"format must be one of {', '.join(known_names())}, got {name!r}")
    return with_parameters(name) if base in FORMATS else find_fp8(name).over_bf16()


def name_for(name: str, kind: str | None) -> str:
    """The name of the encoder for K or V: some store V in another order, which their pages' axis tells."""
    return f"{name}:kind=v" if name in ("fixed4", "fixed3") and kind == "v" else name


def format_of_values(name: str, values: NDArray[Any]) -> Format:
    """The format of a name over arrays like ``values``: BF16 patterns (uint16) or ready FP8 patterns (uint8)."""
    return find_fp8(name).over_values() if values.dtype == "uint8" else find_format(name)


def find_fp8(name: str) -> Fp8Format:
    """The format of a name with a cast in it, over FP8 patterns; ValueError for any other name."""
    base, _, options = name.partition(":")
    coder, _, cast = base.rpartition("+")
    if cast not in CASTS or base not in known_names():
        raise ValueError(f"format must be one of {', '.join(known_names()[len(FORMATS) :])}, got {name!r}")
    key, _, value = options.partition("=")
    if options and key != "scale":
        raise ValueError(f"FP8 formats have one parameter, scale, got {options!r}")
    scale = None if value == "amax" else float(value or 1.0)
    if scale is not None:
        fp8.check_scale(scale)
    return Fp8Format(CASTS[cast], scale, coder)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """A cast, and what packs its bytes: FP8 patterns are ``uint8 [kv_head, token, head_dim]``."""

    kind: Fp8
    scale: float | None  # None: of the packed array's largest magnitude
    coder: str  # of FORMATS; empty: the bytes as they are

    def scale_of(self, patterns: NDArray[np.uint16]) -> float:
        return fp8.amax_scale(patterns, self.kind) if self.scale is None else self.scale

    def cast(self, patterns: NDArray[np.uint16]) -> NDArray[Any]:
        return fp8.cast_table(self.kind, self.scale_of(patterns))[patterns]

    def encode(
        self, values: NDArray[Any], windows: Windows | None, block_tokens: int, scale: float = 1.0
    ) -> Packed:
        """Pack FP8 patterns, losing nothing; windows are of ``stacked.spread(values)``."""
        if not self.coder:
            return fp8.encode_bytes(values, block_tokens, scale)
        if windows is None:
            raise ValueError(f"{self.coder} needs windows, got None")
        return stacked.encode_bytes(values, windows, block_tokens, STACKABLE[self.coder], self.kind, scale)

    def decode(self, packed: Packed) -> NDArray[Any]:
        """The FP8 patterns, bit for bit; CorruptDataError when the pages cannot have come from ``encode``."""
        if not self.coder:
            return fp8.decode_bytes(packed)
        return stacked.decode_bytes(packed, STACKABLE[self.coder], self.kind)

    def over_values(self) -> Format:
        """The same as a format of ``uint8`` arrays that are FP8 patterns already."""
        below = FORMATS[self.coder or "bf16"]

        def coded(values: NDArray[Any]) -> NDArray[np.uint16]:
            return stacked.spread(values, self.kind)

        def main_bytes(kv_heads: int, block_tokens: int, head_dim: int) -> int:
            assert below.main_bytes is not None
            layout = stacked.layout_of((kv_heads, block_tokens, head_dim), STACKABLE[self.coder], self.kind)
            return below.main_bytes(kv_heads, block_tokens, head_dim) - layout.saved_bytes

        return Format(
            encode=self.encode,
            decode=self.decode,
            mode_counts=lambda packed: {},
            count_exceptions=lambda values, packed: below.count_exceptions(coded(values), packed),
            channel_multiple=below.channel_multiple,
            table_entry_bytes=below.table_entry_bytes,
            block_multiple=below.block_multiple,
            fixed_size=below.fixed_size,
            main_bytes=main_bytes if below.main_bytes else None,
            plain_bits=1 + self.kind.mantissa_bits,
            coded=coded,
        )

    def over_bf16(self) -> Format:
        """The same with a cast before it and a widening after it."""
        of_values = self.over_values()

        def encode(patterns: NDArray[np.uint16], windows: Windows, block_tokens: int) -> Packed:
            return self.encode(self.cast(patterns), windows, block_tokens, self.scale_of(patterns))

        def decode(packed: Packed) -> NDArray[np.uint16]:
            return fp8.widen_table(self.kind, packed.scale)[self.decode(packed)]

        def stored(patterns: NDArray[np.uint16]) -> NDArray[np.uint16]:
            return fp8.widen_table(self.kind, self.scale_of(patterns))[self.cast(patterns)]

        return replace(
            of_values,
            encode=encode,
            decode=decode,
            count_exceptions=lambda patterns, packed: of_values.count_exceptions(self.cast(patterns), packed),
            stored=stored,
            coded=lambda patterns: of_values.coded(self.cast(patterns)),
        )
