"""Token counts and prefix blocks of logs that hold text only, by a rule that the user states.

``chars_per_token`` is that rule: a text of n characters counts n / chars_per_token tokens, rounded down but at
least one, and a prefix block is the text of BLOCK_TOKENS tokens, equal where all characters up to its end are.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from kvfold.traces.errors import BadTraceError

#: As in WEKA's agent traces: fine against a prompt of thousands of tokens, coarse against the error of the rule.
BLOCK_TOKENS = 64


def tokens_of(characters: int, chars_per_token: float) -> int:
    """Estimated tokens of a text of that length."""
    return max(min(characters, 1), int(characters / chars_per_token))


def chain_of(text: str, chars_per_token: float) -> list[int]:
    """Ids of the whole blocks of ``text``; the last partial block has none."""
    blocks = tokens_of(len(text), chars_per_token) // BLOCK_TOKENS
    marks = [int(at * BLOCK_TOKENS * chars_per_token) for at in range(blocks + 1)]
    return chain_of_parts(text[a:b].encode(errors="surrogatepass") for a, b in pairwise(marks))


def plain(value: Any) -> str:
    """All texts in a JSON value, whatever they are nested in, one a line."""
    parts: list[str] = []
    left = [value]
    while left:  # not by recursion: a document may be nested as deeply as its parser allows
        item = left.pop()
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item, dict):
            left += reversed(item.values())
        elif isinstance(item, list):
            left += reversed(item)
    return "\n".join(filter(None, parts))


def chain_of_parts(parts: Iterable[bytes]) -> list[int]:
    """63-bit ids of chained blocks: each stands for its own content and all before it."""
    chain: list[int] = []
    above = b""
    for part in parts:
        above = blake2b(above + part, digest_size=8).digest()
        chain.append(int.from_bytes(above, "little") >> 1)
    return chain


def no_counts(source: str, calls: int) -> BadTraceError:
    """What to say of a log without token counts when no rule was stated."""
    rule = f"a trace needs token counts, but the log holds only the text of its {calls:,} calls"
    return BadTraceError(rule, source, "state a rule with --chars-per-token, such as 4 for English prose")


def remark(chars_per_token: float, prompts: int, outputs: int) -> str:
    """The warning that flags estimated counts."""
    return (
        f"tokens of {prompts:,} prompts and {outputs:,} outputs are estimated from text at {chars_per_token:g}"
        " characters each, as stated"
    )
