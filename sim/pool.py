"""The KV pool: one byte budget, cut into allocation units, shared by live sequences and the prefix cache.

A unit is a BF16 page (16 tokens by default) or one codec block: packed slots of fixed size for its pages of every
layer, raw BF16 for the share of pages that does not fit. Packed formats also hold, per live sequence, one raw BF16
tail of a codec block, which is packed once when it is full; every live sequence may hold constant state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.sim.errors import DoesNotFitError

if TYPE_CHECKING:
    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.prefix import PrefixTree


class KvPool:
    """Counts of who holds what; `private + resident <= units for the live sequences` after every call.

    Unpinned units of the prefix cache count as available and are evicted when they are taken.
    """

    def __init__(self, budget: MemoryBudget, tree: PrefixTree | None) -> None:
        self.unit_tokens = budget.unit_tokens
        self.unit_bytes = budget.unit_bytes
        self.capacity_bytes = budget.kv_budget_bytes
        self.per_sequence_bytes = budget.tail_bytes + budget.sequence_bytes
        self.packed = budget.packed
        self.tree = tree
        self.private_units = 0
        self.sequences = 0
        if self.blocks(1) * self.unit_bytes + self.per_sequence_bytes > self.capacity_bytes:
            raise DoesNotFitError(
                f"one sequence needs {self.unit_bytes + self.per_sequence_bytes} bytes of KV pool, "
                f"but the budget is {self.capacity_bytes}; raise --kv-budget or choose a smaller model"
            )

    def blocks(self, tokens: int) -> int:
        """Units of a sequence of `tokens` tokens: pages begun (BF16), or codec blocks filled (packed)."""
        return tokens // self.unit_tokens if self.packed else -(-tokens // self.unit_tokens)

    def fits_alone(self, tokens: int) -> bool:
        """Whether one sequence of `tokens` tokens fits into the empty pool."""
        return self.blocks(tokens) * self.unit_bytes + self.per_sequence_bytes <= self.capacity_bytes

    def available_units(self, more_sequences: int = 0) -> int:
        """Units that can be taken with `more_sequences` more live sequences; negative if even those do not fit."""
        sequences = self.sequences + more_sequences
        live = self.tree.live_units if self.tree else 0
        return self._capacity_units(sequences) - self.private_units - live

    def free_units(self) -> int:
        """Units that nobody holds, so that taking them evicts nothing."""
        resident = self.tree.resident_units if self.tree else 0
        return self._capacity_units(self.sequences) - self.private_units - resident

    def live_bytes(self) -> int:
        """Bytes held by live sequences: their own units, the shared ones that they pin, tails and state."""
        live = self.tree.live_units if self.tree else 0
        return (self.private_units + live) * self.unit_bytes + self.sequences * self.per_sequence_bytes

    def take(self, units: int, more_sequences: int = 0) -> None:
        """Give `units` units (all, or the caller asked for more than is available) to live sequences."""
        self.sequences += more_sequences
        self.private_units += units
        self._evict_excess()

    def give_back(self, units: int, fewer_sequences: int = 0) -> None:
        self.private_units -= units
        self.sequences -= fewer_sequences

    def check(self) -> None:
        """The law of this file, for tests: nothing is negative and nothing is held twice or beyond the budget."""
        resident = self.tree.resident_units if self.tree else 0
        live = self.tree.live_units if self.tree else 0
        assert 0 <= live <= resident, (live, resident)
        assert self.private_units >= 0, self.private_units
        assert self.sequences >= 0, self.sequences
        assert self.private_units + resident <= self._capacity_units(self.sequences)

    def _capacity_units(self, sequences: int) -> int:
        return (self.capacity_bytes - sequences * self.per_sequence_bytes) // self.unit_bytes

    def _evict_excess(self) -> None:
        if self.tree is None:
            return
        excess = self.private_units + self.tree.resident_units - self._capacity_units(self.sequences)
        if excess > 0:
            self.tree.evict(excess)
