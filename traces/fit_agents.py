"""Sessions fitted to those of a trace."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.columns import KIND
from kvfold.traces.draws import MARKS, Quantiles
from kvfold.traces.occupancy import before_in_thread
from kvfold.traces.synth_agent import Agents, Arrival, Start
from kvfold.traces.table import WAIT_KINDS, Ints, Trace

#: A prompt that shrinks by as much was compacted, as 323 of the 422 that shrink in the WEKA archive.
COMPACTION_TOKENS = 16_000
_WITHOUT_END = 1e12


def agents_like(trace: Trace) -> Agents:
    """Sessions with the distributions of ``trace``, each drawn on its own: see `Agents`.

    The trace must have known outputs, and sessions with known waits whose prompts hold the ones before: `grows`.
    """
    main = np.flatnonzero((trace.agent_id == 0) & (trace.session_id >= 0))
    main = main[np.argsort(trace.session_id[main], kind="stable")]
    before = before_in_thread(trace)
    follows = main[before[main] >= 0]
    previous = before[follows]
    kinds = trace.wait_kind[follows]
    context = trace.input_tokens + np.maximum(trace.output_tokens, 0)
    drop = trace.input_tokens[previous] - trace.input_tokens[follows]
    compacted = drop >= COMPACTION_TOKENS
    added = np.maximum(0, trace.input_tokens[follows] - context[previous])[~compacted]
    waits, added_kinds = trace.wait_before_s[follows], kinds[~compacted]

    def arrival(kind: int, of: int) -> Arrival:
        rows = kinds == kind
        known = waits[rows & ~np.isnan(waits)]
        if not len(known):  # then as all others
            known = waits[~np.isnan(waits)]
        return Arrival(
            WAIT_KINDS[kind],
            float(rows.sum() / max(1, of)),
            _table(known, 0.0),
            _table(added[added_kinds == kind], 0.0),
        )

    first_steps, tool_steps = _runs(trace, main)
    first_token_s, token_s = _service(trace)
    ends = kinds != KIND["tool"]
    returns = tuple(arrival(kind, int(ends.sum())) for kind in np.unique(kinds[ends]).tolist())
    return Agents(
        starts=_starts(
            trace, main[before[main] < 0], np.unique(trace.session_id[main], return_counts=True)[1]
        ),
        system_tokens=0,
        output_tokens=Quantiles.of(trace.output_tokens[trace.output_tokens >= 0]),
        first_steps=first_steps,
        tool_steps=tool_steps,
        tool=arrival(KIND["tool"], int((~ends).sum())),
        returns=returns,
        limit_tokens=_limits(trace, context, main),
        kept_share=_table((trace.input_tokens[follows] / trace.input_tokens[previous])[compacted], 1.0),
        first_token_s=first_token_s,
        token_s=token_s,
    )


def grows(trace: Trace) -> bool:
    """Whether prompts of sessions have room for the prompt and the output before them, as a rule (3 in 4)."""
    before = before_in_thread(trace)
    follows = np.flatnonzero(before >= 0)
    held = trace.input_tokens[before[follows]] + np.maximum(0, trace.output_tokens[before[follows]])
    return bool(follows.size and (trace.input_tokens[follows] >= held).mean() > 0.75)


def _table(sample: NDArray[np.generic], otherwise: float) -> Quantiles:
    return Quantiles.of(sample) if len(sample) else Quantiles.constant(otherwise)


def _starts(trace: Trace, first: Ints, calls: Ints) -> tuple[Start, ...]:
    """Sessions in four groups by their first prompt, since long ones are resumed and soon over."""
    tokens = trace.input_tokens[first]
    group = np.searchsorted(np.quantile(tokens, (0.25, 0.5, 0.75)), tokens)
    return tuple(
        Start(
            float((group == at).mean()), Quantiles.of(tokens[group == at]), Quantiles.of(calls[group == at])
        )
        for at in np.unique(group).tolist()
    )


def _runs(trace: Trace, rows: Ints) -> tuple[Quantiles, Quantiles]:
    """Tool results of a session's first run and of later ones; one that the session's end cuts off was longer
    than what is seen of it."""
    sessions = trace.session_id[rows]
    new_session = np.diff(sessions, prepend=-2) != 0
    starts = np.flatnonzero((trace.wait_kind[rows] != KIND["tool"]) | new_session)
    steps = np.diff(np.append(starts, len(rows))) - 1
    ended = np.append(~new_session[starts[1:]], False)
    first = new_session[starts]
    nothing = np.full(len(steps), -1)
    later = ~first if not first.all() else first
    return _product_limit(nothing[first], steps[first], ended[first]), _product_limit(
        nothing[later], steps[later], ended[later]
    )


def _limits(trace: Trace, context: Ints, rows: Ints) -> Quantiles:
    """Context at which a session is first compacted; one that ends before had a higher limit."""
    new_session = np.diff(trace.session_id[rows], prepend=-2) != 0
    dropped = -np.diff(trace.input_tokens[rows], prepend=0) >= COMPACTION_TOKENS
    starts = np.flatnonzero(new_session | dropped)
    ended = np.append(~new_session[starts[1:]], False)
    longest = np.maximum.reduceat(context[rows], starts)
    first = new_session[starts]
    return _product_limit(context[rows[starts]][first] - 1, longest[first], ended[first])


def _product_limit(low: Ints, high: Ints, ended: NDArray[np.bool_]) -> Quantiles:
    """Distribution of a length of which some are seen from ``low`` on and only up to ``high``, where not
    ``ended`` (Kaplan and Meier, Journal of the American Statistical Association 53, 1958).

    What share outlasts all that is seen lies between the last end and the longest value, or is without end
    where none ended.
    """
    if not ended.any():
        return Quantiles.constant(_WITHOUT_END)
    shares, values, left = [0.0], [0.0], 1.0
    for value in np.unique(high[ended]).tolist():
        at_risk = int(((low < value) & (high >= value)).sum())
        left *= 1 - int((ended & (high == value)).sum()) / at_risk
        shares.append(1 - left)
        values.append(value)
    marks = [share for share in MARKS if share < shares[-1]]
    knots = [(share, float(values[bisect_left(shares, share)])) for share in marks]
    return Quantiles((*knots, (1.0, float(high.max()))))


def _service(trace: Trace) -> tuple[float, float]:
    """Least squares of the recorded service: seconds, and seconds a token of output; neither below 0."""
    known = ~np.isnan(trace.recorded_e2e_s) & (trace.output_tokens >= 0)
    if not known.any():
        return 0.0, 0.0
    output, service_s = trace.output_tokens[known], trace.recorded_e2e_s[known]
    deviation = output - output.mean()
    token_s = float((deviation * service_s).sum() / max(1.0, (deviation**2).sum()))
    token_s = min(max(0.0, token_s), float(service_s.mean() / max(1.0, output.mean())))
    return float(service_s.mean() - token_s * output.mean()), token_s
