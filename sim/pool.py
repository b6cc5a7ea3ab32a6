"""The KV pool: one byte budget, taken in allocation units, shared by live sequences and the prefix cache.

A unit is a BF16 page (16 tokens by default) or one codec block: packed slots, or main planes and chunks, for its
pages of every layer, and raw BF16 for pages that do not fit (kvfold.sim.units). Packed formats also hold, per live
sequence, one raw BF16 tail of a codec block, which is packed once when it is full; every live sequence may hold
constant state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.sim.errors import DoesNotFitError

if TYPE_CHECKING:
    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.prefix import PrefixTree
    from kvfold.sim.units import Units


class KvPool:
    """Sums of who holds what; `private + resident + what sequences hold besides <= capacity` after every call.

    Unpinned units of the prefix cache count as available and are evicted, whole units, when they are taken.
    """

    def __init__(self, budget: MemoryBudget, units: Units, tree: PrefixTree | None) -> None:
        self.units = units
        self.unit_tokens = units.tokens
        self.capacity_bytes = budget.kv_budget_bytes
        self.per_sequence_bytes = budget.tail_bytes + budget.sequence_bytes
        self.tree = tree
        self.private_bytes = 0
        self.sequences = 0
        room_bytes = self.capacity_bytes - self.per_sequence_bytes
        self._fitting_tokens = room_bytes // units.largest_bytes * units.tokens  # fit alone whatever is drawn
        if units.blocks(1) * units.largest_bytes + self.per_sequence_bytes > self.capacity_bytes:
            raise DoesNotFitError(
                f"one sequence needs {units.largest_bytes + self.per_sequence_bytes} bytes of KV pool, "
                f"but the budget is {self.capacity_bytes}; raise --kv-budget or choose a smaller model"
            )

    def blocks(self, tokens: int) -> int:
        """Units of a sequence of `tokens` tokens: pages begun (BF16), or codec blocks filled (packed)."""
        return self.units.blocks(tokens)

    def run_bytes(self, call: int, first: int, last: int) -> int:
        """Bytes of the units [first, last) of a call: those of its prompt's chain, then its own."""
        units, tree = self.units, self.tree
        if not units.sums:
            return (last - first) * units.mean_bytes
        if tree is None:
            return units.run_bytes(call, first, last)
        node, end = tree.place(call)
        chained = tree.path_bytes(node, min(last, end), first)
        return chained + (units.run_bytes(call, max(first, end), last) if last > end else 0)

    def fits_alone(self, call: int, tokens: int) -> bool:
        """Whether the call, grown to `tokens` tokens, fits into the empty pool."""
        if tokens <= self._fitting_tokens:
            return True
        needed = self.run_bytes(call, 0, self.units.blocks(tokens))
        return needed + self.per_sequence_bytes <= self.capacity_bytes

    def fits_raw(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens would fit into the empty pool if every block of it stayed raw."""
        return (
            self.units.blocks(tokens) * self.units.raw_bytes + self.per_sequence_bytes <= self.capacity_bytes
        )

    def available_bytes(self, more_sequences: int = 0) -> int:
        """Bytes that can be taken with `more_sequences` more live sequences; negative if even those do not fit."""
        live = self.tree.live_bytes if self.tree else 0
        sequences = self.sequences + more_sequences
        return self.capacity_bytes - sequences * self.per_sequence_bytes - self.private_bytes - live

    def free_bytes(self) -> int:
        """Bytes that nobody holds, so that taking them evicts nothing."""
        resident = self.tree.resident_bytes if self.tree else 0
        return self.capacity_bytes - self.sequences * self.per_sequence_bytes - self.private_bytes - resident

    def live_bytes(self) -> int:
        """Bytes held by live sequences: their own units, the shared ones that they pin, tails and state."""
        live = self.tree.live_bytes if self.tree else 0
        return self.private_bytes + live + self.sequences * self.per_sequence_bytes

    def take(self, size_bytes: int, more_sequences: int = 0) -> int:
        """Give `size_bytes` (all, or the caller asked for more than is available) to live sequences.

        Returns the bytes of cached units that were evicted for it.
        """
        self.sequences += more_sequences
        self.private_bytes += size_bytes
        tree = self.tree
        if tree is None:
            return 0
        before, short = tree.resident_bytes, -self.free_bytes()
        if short > 0:
            tree.evict(short)
        return before - tree.resident_bytes

    def give_back(self, size_bytes: int, fewer_sequences: int = 0) -> None:
        self.private_bytes -= size_bytes
        self.sequences -= fewer_sequences

    def check(self) -> None:
        """The law of this file, for tests: nothing is negative and nothing is held twice or beyond the budget."""
        resident = self.tree.resident_bytes if self.tree else 0
        live = self.tree.live_bytes if self.tree else 0
        assert 0 <= live <= resident, (live, resident)
        assert self.private_bytes >= 0, self.private_bytes
        assert self.sequences >= 0, self.sequences
        assert self.free_bytes() >= 0, self.free_bytes()
