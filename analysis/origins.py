"""Where numbers come from: what each origin means, and which ones a plan's numbers carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

ORIGINS = {
    "measured": "timed or counted on the hardware or data named",
    "interpolated": "between measured points",
    "extrapolated": "outside the measured points",
    "modelled": "computed from datasheet figures or byte counts",
    "published": "taken from somebody's published figures",
    "given": "set by the person who asked",
}


def counted(plan: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Each origin that the plan's numbers carry, how often, and what it means."""
    counts = Counter(walk(plan))
    order = {name: place for place, name in enumerate(ORIGINS)}
    return [
        (name, counts[name], ORIGINS.get(name, "as the row says"))
        for name in sorted(counts, key=lambda name: (order.get(name, len(order)), name))
    ]


def walk(value: Any) -> Iterator[str]:
    """Every text under the key ``origin``, at any depth, in order."""
    if isinstance(value, Mapping):
        if isinstance(value.get("origin"), str):
            yield value["origin"]
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)
