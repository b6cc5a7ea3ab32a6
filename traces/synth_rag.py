"""Questions to a service that retrieves passages: prompts put together from chunks of text.

A prompt is a fixed instruction, a part that changes now and then (the time, say), a part of its own, passages
by their popularity in the order in which they were found, and a history with the question. Passages come back
often, but in other places: a prefix cache meets few of those that a cache of chunks would.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.traces.arrivals import Clients
from kvfold.traces.draft import Call, Prompt, laid_out
from kvfold.traces.draws import Quantiles, draws, rounded, uniforms
from kvfold.traces.table import Trace


@dataclass(frozen=True, slots=True)
class Rag:
    """Chunks of a prompt in tokens, in this order.

    The changing part is new with probability ``changes``, the own part with ``own_new``; else they are the
    one before. A share ``retrieves`` has ``passages`` distinct passages, whose popularity ranks (from 1) are
    ``passage_rank`` and whose length depends on the rank alone; a share ``searches`` a web result.
    """

    fixed_tokens: int
    changing_tokens: int
    changes: float
    own_tokens: int
    own_new: float
    retrieves: float
    passages: int
    passage_rank: Quantiles
    passage_tokens: Quantiles
    searches: float
    web_tokens: Quantiles
    history_tokens: Quantiles
    question_tokens: Quantiles
    output_tokens: Quantiles


def rag(model: Rag, requests: int, arrivals: Clients, seed: int) -> Trace:
    """``requests`` single-shot calls. A warning says what share of the tokens stands in chunks seen before."""
    arrival_s, clients = arrivals.arrivals(requests, seed)
    maker = _Maker(model, seed)
    calls = [
        Call(rounded(time_s), maker.prompt(), max(1, round(next(maker.output))), tenant=f"client-{client}")
        for time_s, client in zip(arrival_s.tolist(), clients.tolist(), strict=True)
    ]
    text = f"synthetic: {requests:,} retrieval requests of {arrivals.count} clients"
    seen = f"{maker.seen_tokens / maker.tokens:.1%} of the prompt tokens stand in chunks that came before"
    return laid_out(
        calls,
        f"rag seed {seed}",
        [f"{text}, {arrivals.rate_per_s:.4g} a second, seed {seed}", f"{seen}, in any order"],
    )


class _Maker:
    """Makes prompts one after another, as paths in the tree of all chunk sequences so far."""

    def __init__(self, model: Rag, seed: int) -> None:
        self._model = model
        self._changes, self._own = uniforms(seed, "changes"), uniforms(seed, "own")
        self._retrieves, self._searches = uniforms(seed, "retrieves"), uniforms(seed, "searches")
        self._rank = draws(model.passage_rank, seed, "rank")
        self._length = draws(model.passage_tokens, seed, "passage")
        self._web = draws(model.web_tokens, seed, "web")
        self._history = draws(model.history_tokens, seed, "history")
        self._question = draws(model.question_tokens, seed, "question")
        self.output = draws(model.output_tokens, seed, "output")
        self._tree: dict[tuple[int, str], Prompt] = {}
        self._root = Prompt(0)
        self._seen: dict[str, int] = {}  # tokens of each chunk so far
        self._change = self._owner = 0
        self.tokens = self.seen_tokens = 0

    def prompt(self) -> Prompt:
        model = self._model
        self._change += next(self._changes) < model.changes
        self._owner += next(self._own) < model.own_new
        chunks = [("fixed", model.fixed_tokens), (f"change {self._change}", model.changing_tokens)]
        chunks.append((f"own {self._owner}", model.own_tokens))
        if next(self._retrieves) < model.retrieves:
            ranks: dict[int, None] = {}
            while len(ranks) < model.passages:
                ranks[round(next(self._rank))] = None
            for rank in ranks:
                name = f"passage {rank}"
                chunks.append((name, self._seen.get(name) or max(1, round(next(self._length)))))
        path = self._root
        for name, tokens in chunks:
            path = self._then(path, name, tokens)
        tail = round(next(self._history)) + round(next(self._question))
        if next(self._searches) < model.searches:
            tail += round(next(self._web))
        self.tokens += tail
        return path.then(tail)

    def _then(self, path: Prompt, name: str, tokens: int) -> Prompt:
        self.tokens += tokens
        self.seen_tokens += tokens if name in self._seen else 0
        self._seen[name] = tokens
        return self._tree.setdefault((id(path), name), path.then(tokens))
