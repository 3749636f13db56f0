"""OGC (Feng and Huang 2021): the optimal checkpoints on any graph, segments having one input and one output.

The graph has a vertex per operator of the forward, weighing the bytes of its results. A set K of vertices is kept
such that every connected part of the rest, a *segment*, is entered from one vertex of K only and left to one only.
The objective is the bytes of K plus those of the largest segment. Time and budget play no part.

The segments that are possible form a tree (the paper's division tree): within a segment either everything passes
through some vertices one after the other (a chain), or the largest proper segments are apart from each other. For
a bound C on the largest segment the best K follows by dynamic programming over the tree; along a chain the segments
that fit into C are a sliding window. The bounds that can be best are the weights of segments and of stretches of
chains; a stretch of bounds whose ends prove that none of it is better is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from .checkpointing import Keeping


def ogc(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Keep OGC's vertices, and run every segment again when it is needed.

    The last segment is kept as well, where that takes no more memory: the backward starts with it, so that running it
    again, as OGC's own code does, would free nothing.
    """
    keeping = Keeping(program, costs, extra_bytes)
    tasks = [keeping.program.tasks[p] for p in keeping.forward.schedule.forward]
    is_source = [all(program.values[v].kind in ("parameter", "buffer") for v in task.reads) for task in tasks]
    reads = attach_sources(keeping.forward.reads, is_source)
    kept, _ = best_vertices(reads, keeping.forward.bytes)
    whole = keeping.schedule(kept)
    held = keeping.schedule(kept | last_segment(reads, kept))
    return keeping.whole(keeping.fastest([held, whole], keeping.report(whole).peak_bytes))


def attach_sources(reads: Sequence[frozenset[int]], is_source: Sequence[bool]) -> list[frozenset[int]]:
    """The graph in which a vertex without inputs, such as a dropout's noise, has the predecessors of its only reader.

    Otherwise such a vertex would be an entry of its segment, and no segment could hold two dropouts.
    """
    placed = list(reads)
    for v in (v for v, alone in enumerate(is_source) if alone):
        readers = [others for others in reads if v in others]
        if len(readers) == 1 and max(readers[0] - {v}, default=v) < v:
            placed[v] = readers[0] - {v}
    return placed


def last_segment(reads: Sequence[frozenset[int]], kept: frozenset[int]) -> frozenset[int]:
    """The vertices after which no kept vertex comes; arguments as for `best_vertices`."""
    before_kept: set[int] = set()
    for v in reversed(range(len(reads))):
        if v in kept or v in before_kept:
            before_kept |= reads[v]
    return frozenset(range(len(reads))) - kept - before_kept


def best_vertices(reads: Sequence[frozenset[int]], weights: Sequence[int]) -> tuple[frozenset[int], int]:
    """The vertices to keep and the objective.

    Args:
        reads: for every vertex, its predecessors; all of them have smaller numbers.
        weights: of every vertex, at least 0.
    """
    tree = _Graph(reads, weights).root
    total = sum(weights)
    found: dict[int, int] = {}

    def objective(bound: int) -> int:
        if bound not in found:
            found[bound] = total - tree.covered(bound)[0] + bound
        return found[bound]

    bounds = sorted({0, *tree.bounds()})
    best = bounds[0]
    stretches = [(0, len(bounds) - 1)]
    while stretches:
        low, high = stretches.pop()
        for end in (low, high):
            if objective(bounds[end]) < objective(best):
                best = bounds[end]
        # A bound in between keeps at least the bytes of the upper end, and is at least the lower end.
        if high - low > 1 and objective(bounds[high]) - bounds[high] + bounds[low + 1] < objective(best):
            middle = (low + high) // 2
            stretches += [(low, middle), (middle, high)]
    covered = tree.covered(best)[1]
    return frozenset(range(len(weights))) - covered, objective(best)


@dataclass(frozen=True)
class _Segment:
    """A segment and how it divides.

    Attributes:
        inside: its vertices.
        weight: of all of them.
        chain: the vertices through which everything passes, in order; empty if there are none.
        parts: the segments between one of the chain's vertices and the next, ends included; without a chain, one
            list of the largest proper segments.
    """

    inside: frozenset[int]
    weight: int
    chain: tuple[int, ...]
    weights: tuple[int, ...]
    parts: tuple[tuple[_Segment, ...], ...]

    def covered(self, bound: int) -> tuple[int, frozenset[int]]:
        """The most weight that segments of at most ``bound`` can cover, and the vertices that they cover."""
        if self.weight <= bound:
            return self.weight, self.inside
        alone = [[part.covered(bound) for part in parts] for parts in self.parts]
        sums = [sum(weight for weight, _ in parts) for parts in alone]
        if not self.chain:
            return sums[0], frozenset().union(*(vertices for _, vertices in alone[0]))
        # best[i]: up to the i-th vertex of the chain, which is kept; 0 and the last are the segment's own ends.
        places = len(self.chain) + 2
        best, source = [0] * places, [0] * places
        window: list[int] = []  # starts of stretches that fit, the best one first
        head = 0
        for i in range(1, places):
            best[i], source[i] = best[i - 1] + sums[i - 1], i - 1
            if i >= 2:
                start = i - 2
                while (
                    len(window) > head
                    and best[window[-1]] - self._before[window[-1]] <= best[start] - self._before[start]
                ):
                    window.pop()
                window.append(start)
            while len(window) > head and self._stretch(window[head], i) > bound:
                head += 1
            if len(window) > head:
                value = best[window[head]] + self._stretch(window[head], i)
                if value > best[i]:
                    best[i], source[i] = value, window[head]
        vertices: set[int] = set()
        i = places - 1
        while i:
            start = source[i]
            if start == i - 1:
                vertices.update(*(covered for _, covered in alone[start]))
            else:
                vertices.update(self.chain[start : i - 1])
                vertices.update(*(part.inside for parts in self.parts[start:i] for part in parts))
            i = start
        return best[-1], frozenset(vertices)

    @cached_property
    def _before(self) -> list[int]:
        """Weight of all that stands before the i-th place of the chain and of that place."""
        between = [sum(part.weight for part in parts) for parts in self.parts]
        return [0, *accumulate(a + b for a, b in zip(between, (*self.weights, 0), strict=True))]

    def _stretch(self, start: int, end: int) -> int:
        """Weight strictly between two places of the chain, which are kept."""
        last = 0 if end > len(self.chain) else self.weights[end - 1]
        return self._before[end] - self._before[start] - last

    def bounds(self) -> Iterator[int]:
        """Weights of all segments that could be chosen."""
        yield self.weight
        if self.chain:
            places = len(self.chain) + 2
            yield from (self._stretch(i, j) for i in range(places) for j in range(i + 2, places))
        for parts in self.parts:
            for part in parts:
                yield from part.bounds()


class _Graph:
    """Vertices 0 .. n - 1 between a source and a target; sets of vertices are the bits of an integer."""

    def __init__(self, reads: Sequence[frozenset[int]], weights: Sequence[int]) -> None:
        count = len(weights)
        self.weights = (*weights, 0, 0)
        self.source, self.target = count, count + 1
        self.before = [_bits(us) if us else 1 << self.source for us in reads] + [0, 0]
        self.after = [0] * (count + 2)
        for v in range(count):
            for u in _members(self.before[v]):
                self.after[u] |= 1 << v
        for v in range(count):
            if not self.after[v]:
                self.after[v] = 1 << self.target
                self.before[self.target] |= 1 << v
        self.around = [before | after for before, after in zip(self.before, self.after, strict=True)]
        parts = tuple(
            self._segment(part, self.source, self.target)
            for part in self._parts(self.source, self.target, (1 << count) - 1)
        )
        # Apart from each other, they are never one segment: as one, they would be dearer than keeping everything.
        whole = _Segment(frozenset(range(count)), sum(weights) + 1, (), (), (parts,))
        self.root = parts[0] if len(parts) == 1 else whole

    def _parts(self, a: int, b: int, within: int) -> list[int]:
        """The segments from a to b among the vertices ``within``: nothing else borders on them."""
        left = _reach(self.after[a], within, self.after) & _reach(self.before[b], within, self.before)
        while True:
            ends_a, ends_b = left | 1 << a, left | 1 << b
            bad = [v for v in _members(left) if self.before[v] & ~ends_a or self.after[v] & ~ends_b]
            if not bad:
                break
            left &= ~_bits(bad)
        found = []
        while left:
            part = _reach(left & -left, left, self.around)
            found.append(part)
            left &= ~part
        return found

    def _segment(self, inside: int, a: int, b: int) -> _Segment:
        weight = sum(self.weights[v] for v in _members(inside))
        chain = self._passed_by_all(inside, a, b)
        if chain:
            ends = [a, *chain, b]
            parts = []
            for low, high in zip(ends, ends[1:], strict=False):
                between = inside & ~_bits(chain)
                parts.append(tuple(self._segment(p, low, high) for p in self._parts(low, high, between)))
        else:
            parts = [tuple(self._largest(inside, a, b))]
        names = frozenset(_members(inside))
        return _Segment(names, weight, tuple(chain), tuple(self.weights[v] for v in chain), tuple(parts))

    def _passed_by_all(self, inside: int, a: int, b: int) -> list[int]:
        """The vertices inside on every path from a to b, in order: the dominators of b."""
        dominator = _immediate_dominators(self._between(inside, a, b), a)
        found: list[int] = []
        v = dominator.get(b)
        while v is not None and v != a:
            found.append(v)
            v = dominator[v]
        return found[::-1]

    def _between(self, inside: int, a: int, b: int) -> list[tuple[int, int]]:
        """The edges among the vertices inside and both ends."""
        edges: list[tuple[int, int]] = []
        for v in _members(inside):
            edges += ((u, v) for u in _members(self.before[v] & (inside | 1 << a)))
            if self.after[v] & 1 << b:
                edges.append((v, b))
        return edges

    def _largest(self, inside: int, a: int, b: int) -> Iterator[_Segment]:
        """The largest proper segments inside; two of them never touch.

        A segment's entry dominates what is inside it, its exit postdominates it: few pairs of ends have anything
        between them.
        """
        edges = self._between(inside, a, b)
        behind = _dominated(_immediate_dominators(edges, a), a, inside)
        ahead = _dominated(_immediate_dominators([(v, u) for u, v in edges], b), b, inside)
        candidates: list[tuple[int, int, int]] = []
        for low, follows in behind.items():
            for high, leads in ahead.items():
                if follows & leads and (low, high) != (a, b):
                    candidates += ((part, low, high) for part in self._parts(low, high, follows & leads))
        taken = 0
        for part, low, high in sorted(candidates, key=lambda c: -c[0].bit_count()):
            if not part & taken and part != inside:
                taken |= part
                yield self._segment(part, low, high)


def _immediate_dominators(edges: Sequence[tuple[int, int]], start: int) -> Mapping[int, int | None]:
    """The last vertex before each that every path to it from ``start`` passes."""
    import networkx as nx  # which takes a tenth of a second to import

    graph = nx.DiGraph(edges)
    graph.add_node(start)
    found: Mapping[int, int | None] = nx.immediate_dominators(graph, start)
    return found


def _dominated(dominator: Mapping[int, int | None], start: int, inside: int) -> dict[int, int]:
    """The vertices inside that each vertex dominates, itself apart; ``dominator`` holds the immediate ones."""
    found: dict[int, int] = {}
    for v in _members(inside):
        above = dominator[v]
        while above is not None:
            found[above] = found.get(above, 0) | 1 << v
            above = dominator[above] if above != start else None
    return found


def _reach(new: int, within: int, neighbours: Sequence[int]) -> int:
    """These vertices and those that can be reached from them by way of vertices within; all are within."""
    seen, new = 0, new & within
    while new:
        seen |= new
        step = 0
        for v in _members(new):
            step |= neighbours[v]
        new = step & within & ~seen
    return seen


def _bits(members: Sequence[int] | frozenset[int]) -> int:
    result = 0
    for v in members:
        result |= 1 << v
    return result


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
