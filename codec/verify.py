"""Whether two arrays hold the same bits, and where they do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Mismatches:
    """How many patterns differ, and the first of them as lines ``[head, token, channel] expected -> got``."""

    count: int
    first: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.count > 0


def find_mismatches(expected: NDArray[np.uint16], actual: NDArray[np.uint16], show: int = 5) -> Mismatches:
    """Compare bits, so NaN payloads and signs of zero count. Raises ValueError when shape or dtype differ."""
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        raise ValueError(
            f"arrays must agree in shape and dtype, expected {expected.dtype} {list(expected.shape)}, "
            f"got {actual.dtype} {list(actual.shape)}"
        )
    places = np.argwhere(expected != actual)
    lines = tuple(
        f"{place.tolist()} 0x{int(expected[tuple(place)]):04x} -> 0x{int(actual[tuple(place)]):04x}"
        for place in places[:show]
    )
    return Mismatches(len(places), lines)
