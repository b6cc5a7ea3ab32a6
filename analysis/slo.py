"""Service-level objectives: the limits that make one request a good one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.analysis.latency import COMPLETED, call_latency
from kvfold.sim.errors import ConfigError
from kvfold.sim.run import Calls

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
_LIMIT = re.compile(r"(ttft|tpot|e2e)=([0-9.eE+-]+)(s|ms|us)")
_EXAMPLE = "write for example ttft=2s,tpot=100ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds; None sets no limit. A request is good when it completes within all of them."""

    name: str
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


#: ``chat`` and ``interactive`` are MLPerf Inference's Server and Interactive limits for llama3.1-8b.
PRESETS = {
    "chat": Slo("chat", 2.0, 0.1, None),
    "interactive": Slo("interactive", 0.5, 0.03, None),
    "agent": Slo("agent", 10.0, 0.1, None),
    "offline": Slo("offline", None, None, None),
}


def parse_slo(text: str) -> Slo:
    """A preset by its name, or own limits on ``ttft``, ``tpot``, ``e2e`` such as ``ttft=2s,tpot=100ms``.

    Units are s, ms and us. Raises ConfigError for an unknown name, a limit given twice, or a time that is
    not a positive number with a unit.
    """
    if text in PRESETS:
        return PRESETS[text]
    if "=" not in text:
        raise ConfigError(
            f"an SLO must be one of {', '.join(PRESETS)} or a list of limits, got {text!r}; {_EXAMPLE}"
        )
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"an SLO limit must be ttft, tpot or e2e = a time in s, ms or us, "
                f"got {part.strip()!r}; {_EXAMPLE}"
            )
        name, number, unit = match.groups()
        if name in limits:
            raise ConfigError(f"an SLO limit must be given once, got {name} twice in {text!r}; {_EXAMPLE}")
        limits[name] = _positive(number, part.strip()) / _PER_SECOND[unit]
    return Slo(text, limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def describe(slo: Slo) -> str:
    """The limits in words: ``TTFT ≤ 2 s and TPOT ≤ 100 ms``."""
    limits = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    parts = [
        f"{name} ≤ {limit_s:g} s" if limit_s >= 1 else f"{name} ≤ {limit_s * 1e3:g} ms"
        for name, limit_s in limits
        if limit_s is not None
    ]
    return " and ".join(parts) or "no limits"


def good(slo: Slo, calls: Calls) -> NDArray[np.bool_]:
    """Which calls completed within every limit; a one-token output has no TPOT and passes that limit."""
    times = call_latency(calls)
    passed = calls.outcome == COMPLETED
    if slo.ttft_s is not None:
        passed &= times.ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        passed &= (times.tpot_s <= slo.tpot_s) | (calls.output_tokens < 2)
    if slo.e2e_s is not None:
        passed &= times.e2e_s <= slo.e2e_s
    return passed


def _positive(number: str, part: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"an SLO limit must be a positive, finite time, got {part!r}; {_EXAMPLE}")
    return value
