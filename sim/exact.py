"""Sums of products of integers that are too large for 64 bits, over whole columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvfold.sim.run import Ints

_BITS = 31
_LOW = np.int64(2**_BITS - 1)


def exact_dot(ones: Ints, others: Ints) -> int:
    """The sum of ones[i] * others[i], for integers from 0 to 2^62 - 1 in fewer than 2^32 rows.

    Both are split into halves of 31 bits, whose products fit 62 bits, and the halves of those are added up.
    """
    total = 0
    for place, one in enumerate((ones & _LOW, ones >> _BITS)):
        for more, other in enumerate((others & _LOW, others >> _BITS)):
            products = one * other
            high, low = int((products >> _BITS).sum()), int((products & _LOW).sum())
            total += ((high << _BITS) + low) << _BITS * (place + more)
    return total
