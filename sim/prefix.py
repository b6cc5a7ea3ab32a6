"""Prefix cache: which leading blocks of a prompt are in the KV pool, kept as a tree of runs.

A node is a run of consecutive allocation units (pages, or codec blocks) of a prefix chain. A conversation that
only grows is one node however many calls it makes, so the cost of a call depends on its forks, not on its length.
Positions count units from the start of the prompt. What is resident of a node is a leading part of it, and a
node with anything resident has its whole path resident, as equal blocks are reached only through equal prefixes.

Units held by live sequences (pinned) stay; the others are evicted from the end of the least recently used run.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.sim.units import Units
    from kvfold.traces.table import Trace


class Node:
    """A run of units [start, end) below `parent`; [start, resident) is in the pool, [start, live_to) is pinned.

    [start, computed) was in the pool at some time.
    """

    __slots__ = (
        "computed",
        "end",
        "index",
        "kids_live",
        "kids_resident",
        "live_to",
        "parent",
        "pins",
        "resident",
        "start",
        "used",
    )

    def __init__(self, index: int, parent: Node | None, start: int, end: int) -> None:
        self.index = index
        self.parent = parent
        self.start = self.resident = self.live_to = self.computed = start
        self.end = end
        self.used = 0  # time of the last release
        self.pins: list[int] = []  # ends of the pinned parts, one per live sequence
        self.kids_live: dict[int, int] = {}  # attach position -> children with pinned units
        self.kids_resident: dict[int, int] = {}  # attach position -> children with resident units

    def evictable_from(self) -> int:
        """Position from which resident units may go: after every pin and every child that is resident."""
        limit = self.live_to
        if self.kids_resident:
            limit = max(limit, max(self.kids_resident))
        return limit


class PrefixTree:
    """Residency of every prefix chain of a trace; a node's index is the key of its units.

    `resident_bytes` are those of the units held by the cache, `live_bytes` those of the pinned ones among them.
    """

    def __init__(self, trace: Trace, units: Units) -> None:
        self.resident_bytes = 0
        self.live_bytes = 0
        self._units = units
        self._unit_tokens = units.tokens
        self._block_tokens = trace.meta.block_size_tokens
        self._shared_parent = trace.shared_parent.tolist()
        self._shared_blocks = trace.shared_blocks.tolist()
        self._new_blocks = trace.new_blocks.tolist()
        self._input_tokens = trace.input_tokens.tolist()
        self._root = Node(0, None, 0, 0)
        self._nodes = [self._root]
        self._places: dict[int, tuple[Node, int]] = {}  # call -> its chain's last node and end
        self._candidates: list[tuple[int, int]] = []  # heap of (used, node index), checked when popped

    def lookup(self, call: int) -> tuple[Node, int]:
        """Longest resident prefix of the call's prompt: its node and end position (0: nothing resident).

        At least one prompt token is left to compute, as an engine needs its logits.
        """
        node, position = self.place(call)
        position = min(position, (self._input_tokens[call] - 1) // self._unit_tokens)
        while node.parent is not None:
            if position > node.start and node.resident > node.start:
                return node, min(position, node.resident)
            position = min(position, node.start)
            node = node.parent
        return node, 0

    def ever(self, call: int) -> int:
        """Units of the longest prefix of the call's prompt that was resident at some time."""
        node, position = self.place(call)
        while node.parent is not None:
            if position > node.start and node.computed > node.start:
                return min(position, node.computed)
            position = min(position, node.start)
            node = node.parent
        return 0

    def shared(self, call: int, node: Node, position: int) -> int:
        """Units that the call's prompt has in common with the path that ends at `position` of `node`."""
        ends = {}
        above: Node | None = node
        while above is not None:
            ends[above.index] = position
            position = min(position, above.start)
            above = above.parent
        mine, end = self.place(call)
        while mine.index not in ends:
            assert mine.parent is not None
            end = min(end, mine.start)
            mine = mine.parent
        return min(end, ends[mine.index])

    def path_bytes(self, node: Node, position: int, above: int = 0) -> int:
        """Bytes of the units [above, position) of the path that ends at `position` of `node`."""
        found = 0
        current: Node | None = node
        while current is not None and position > above:
            if position > current.start:
                found += self._units.run_bytes(current.index, max(above, current.start), position)
                position = current.start
            current = current.parent
        return found

    def insert(self, call: int) -> tuple[Node, int, int]:
        """Make the call's whole chain resident; returns its last node, its end and the bytes newly resident."""
        end_node, end = self.place(call)
        node, position, added = end_node, end, 0
        while node.parent is not None and node.resident < position:
            if node.resident == node.start:
                kids = node.parent.kids_resident
                kids[node.start] = kids.get(node.start, 0) + 1
            added += self._units.run_bytes(node.index, node.resident, position)
            node.resident = position
            node.computed = max(node.computed, position)
            position = node.start
            node = node.parent
        self.resident_bytes += added
        return end_node, end, added

    def pin(self, node: Node, position: int) -> None:
        """Hold the path to `position` for a live sequence."""
        if position > node.start:
            node.pins.append(position)
            self._refresh(node)

    def unpin(self, node: Node, position: int, now: int | None) -> None:
        """Release a pin; `now` is the time of use, None where the pin was only tried out."""
        if position > node.start:
            node.pins.remove(position)
            if now is not None:
                above: Node | None = node
                while above is not None:
                    above.used = now
                    above = above.parent
            self._refresh(node)

    def drop(self, node: Node, position: int) -> None:
        """Let the chain that ends here go, as far as nobody else pins it or goes on from it."""
        current = node
        while current.parent is not None and current.resident <= max(position, current.start):
            limit = current.evictable_from()
            if current.resident > limit:
                self.resident_bytes -= self._units.run_bytes(current.index, limit, current.resident)
            if limit > current.start:
                current.resident = min(current.resident, limit)
                return
            if current.resident > current.start:
                current.resident = current.start
                self._forget(current.parent.kids_resident, current.start)
            position, current = current.start, current.parent

    def evict(self, size_bytes: int) -> None:
        """Drop unpinned units until so many bytes are gone, least recently used run first, each from its end.

        The caller has checked that so many are unpinned.
        """
        while size_bytes > 0:
            used, index = heappop(self._candidates)
            node = self._nodes[index]
            limit = node.evictable_from()
            if node.resident <= limit:
                continue
            if used != node.used:
                heappush(self._candidates, (node.used, index))
                continue
            kept = max(limit, self._units.cut(index, node.resident, size_bytes))
            dropped_bytes = self._units.run_bytes(index, kept, node.resident)
            node.resident = kept
            self.resident_bytes -= dropped_bytes
            size_bytes -= dropped_bytes
            if node.resident > limit:
                heappush(self._candidates, (used, index))
            if node.resident == node.start and node.parent is not None:
                self._forget(node.parent.kids_resident, node.start)
                heappush(self._candidates, (node.parent.used, node.parent.index))

    def place(self, call: int) -> tuple[Node, int]:
        """Where the call's chain ends in the tree, which is extended by the chains not seen before."""
        unseen = []
        while call not in self._places:
            unseen.append(call)
            call = self._shared_parent[call]
            if call < 0:
                break
        for current in reversed(unseen):
            self._places[current] = self._attach(current)
        return self._places[unseen[0]] if unseen else self._places[call]

    def _attach(self, call: int) -> tuple[Node, int]:
        parent_call = self._shared_parent[call]
        shared_blocks = self._shared_blocks[call] if parent_call >= 0 else 0
        chain_tokens = (shared_blocks + self._new_blocks[call]) * self._block_tokens
        end = min(self._input_tokens[call], chain_tokens) // self._unit_tokens
        node, shared = self._root, 0
        if parent_call >= 0:
            node, parent_end = self._places[parent_call]
            shared = min(end, parent_end, shared_blocks * self._block_tokens // self._unit_tokens)
            while node.parent is not None and shared <= node.start:
                node = node.parent
        if end == shared:
            return node, end
        if node.parent is not None and shared == node.end:
            node.end = end
            return node, end
        child = Node(len(self._nodes), node, shared, end)
        self._nodes.append(child)
        return child, end

    def _refresh(self, node: Node) -> None:
        """Recompute what is pinned of a node after a change below it, and go on to its parent if need be."""
        current: Node | None = node
        while current is not None:
            live_to = max(current.pins, default=current.start)
            if current.kids_live:
                live_to = max(live_to, max(current.kids_live))
            live_to = max(live_to, current.start)
            before = current.live_to
            if live_to == before:
                return
            current.live_to = live_to
            self.live_bytes += self._units.run_bytes(current.index, before, live_to)
            if live_to < before:
                heappush(self._candidates, (current.used, current.index))
            parent = current.parent
            if parent is None or (before > current.start) == (live_to > current.start):
                return
            if live_to > current.start:
                parent.kids_live[current.start] = parent.kids_live.get(current.start, 0) + 1
            else:
                self._forget(parent.kids_live, current.start)
            current = parent

    @staticmethod
    def _forget(counts: dict[int, int], position: int) -> None:
        if counts[position] == 1:
            del counts[position]
        else:
            counts[position] -= 1
