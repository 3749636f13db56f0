"""The order of kernels in which what Inductor can fuse stands together.

Kernels that Inductor does not generate (products, convolutions, attention) are *anchors*: they keep their order.
Before, between and behind them are *places*. The generated kernels of one place are one group, within which Inductor
fuses, or several where memory does not permit that. A generated kernel may stand at any place between the anchors that
make what it reads and those that read what it makes.

A place costs the bytes that its kernels move if all of them that share a tensor are one kernel: what they read from
elsewhere, each tensor once, what others read of their results, and a launch for each set without a tensor in common.
What is made and read within a place alone costs neither time nor memory. The order is found by moving one kernel at a
time, to places where one stands that shares a tensor with it; three orders are tried as a start: as given, everything
as early as possible, everything as late as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

#: How often all kernels are looked at.
ROUNDS = 4


@dataclass(frozen=True)
class Item:
    """A kernel to be placed.

    Attributes:
        reads, writes: tensors, each of which is written once.
        moves: it is generated; else it is an anchor.
        beside_bytes: memory beside its tensors while it runs.
        after: items that must run before it for other reasons: they read what it overwrites.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    moves: bool
    beside_bytes: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chain:
    """The kernels of a graph, in an order that is right.

    Attributes:
        items: the kernels.
        sizes: bytes of all tensors that they read or write and that memory counts.
        traffic: bytes of all tensors that they read or write.
        given: tensors that exist before the first one runs.
        kept: tensors that exist when the last one has run.
        launch_bytes: what could be moved in the time of a launch.
    """

    items: tuple[Item, ...]
    sizes: Mapping[int, int]
    traffic: Mapping[int, int]
    given: frozenset[int]
    kept: frozenset[int]
    launch_bytes: int

    @cached_property
    def maker(self) -> dict[int, int]:
        """The item that writes a tensor."""
        return {v: k for k, item in enumerate(self.items) for v in item.writes}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The items that read a tensor."""
        found: dict[int, list[int]] = {}
        for k, item in enumerate(self.items):
            for v in item.reads:
                found.setdefault(v, []).append(k)
        return found

    @cached_property
    def before(self) -> list[set[int]]:
        """The items that must run before each one."""
        return [
            {*(self.maker[v] for v in item.reads if v in self.maker), *item.after} - {k}
            for k, item in enumerate(self.items)
        ]

    @cached_property
    def behind(self) -> list[set[int]]:
        """The items that must run after each one."""
        found: list[set[int]] = [set() for _ in self.items]
        for k, others in enumerate(self.before):
            for other in others:
                found[other].add(k)
        return found

    @cached_property
    def spots(self) -> list[int]:
        """Of anchors how many there are before, of other items the place where they stand in the given order."""
        found, count = [], 0
        for item in self.items:
            found.append(count)
            count += not item.moves
        return found

    @property
    def places(self) -> int:
        """How many places there are."""
        return sum(not item.moves for item in self.items) + 1


class Arrangement:
    """A place for each generated kernel of a chain."""

    def __init__(self, chain: Chain, spots: Sequence[int]) -> None:
        self.chain, self.spots = chain, list(spots)
        self.at: list[set[int]] = [set() for _ in range(chain.places)]
        for k, item in enumerate(chain.items):
            if item.moves:
                self.at[self.spots[k]].add(k)

    def range_of(self, k: int) -> tuple[int, int]:
        """The first and the last place where an item may stand while the others stay."""
        items, spots = self.chain.items, self.spots
        first = max((spots[o] + (not items[o].moves) for o in self.chain.before[k]), default=0)
        last = min((spots[o] for o in self.chain.behind[k]), default=self.chain.places - 1)
        return first, last

    def cost(self, place: int) -> int:
        """The bytes that the kernels of a place move, launches included."""
        return self.cost_of(self.at[place])

    def cost_of(self, group: Collection[int]) -> int:
        """The bytes that kernels at one place move, launches included."""
        chain = self.chain
        touched: set[int] = set()
        whole = {k: k for k in group}  # a tree of each set with tensors in common
        first: dict[int, int] = {}

        def root(k: int) -> int:
            while whole[k] != k:
                k = whole[k]
            return k

        for k in group:
            for v in (*chain.items[k].reads, *chain.items[k].writes):
                whole[root(k)] = root(first.setdefault(v, k))
                is_inner = chain.maker.get(v) in group and v not in chain.kept and self._inner(v, group)
                if not is_inner:
                    touched.add(v)
        return sum(chain.traffic[v] for v in touched) + chain.launch_bytes * sum(whole[k] == k for k in group)

    def _inner(self, v: int, group: Collection[int]) -> bool:
        return all(k in group for k in self.chain.readers.get(v, ()))

    @property
    def total(self) -> int:
        """The bytes that all generated kernels move."""
        return sum(map(self.cost, range(self.chain.places)))

    def move(self, k: int, place: int) -> None:
        """Put an item elsewhere."""
        self.at[self.spots[k]].discard(k)
        self.at[place].add(k)
        self.spots[k] = place

    def order(self) -> list[int]:
        """All items in order."""
        return sorted(range(len(self.spots)), key=lambda k: (self.spots[k], not self.chain.items[k].moves, k))

    def followed(self, limit_bytes: int) -> tuple[list[int], list[int]]:
        """The memory while each item runs, and the number of its group, by item.

        All that a group writes is there at once, but for what is read within it alone. A place is split into several
        groups where one would need more than the limit.
        """
        chain, items = self.chain, self.chain.items
        alive, memory = set(chain.given), sum(chain.sizes[v] for v in chain.given)
        left = {v: len(readers) for v, readers in chain.readers.items()}
        levels, groups = [0] * len(items), [0] * len(items)

        def needed(group: Sequence[int]) -> tuple[set[int], int]:
            written = {v for k in group for v in items[k].writes}
            lasting = {v for v in written if v in chain.kept or len(group) == 1 or not self._inner(v, group)} - alive
            beside = max(items[k].beside_bytes for k in group)
            return lasting, memory + sum(chain.sizes[v] for v in lasting) + beside

        for number, group in enumerate(self._together(lambda group: needed(group)[1] <= limit_bytes)):
            lasting, level = needed(group)
            for k in group:
                levels[k], groups[k] = level, number
                for v in items[k].reads:
                    left[v] -= 1
            alive |= lasting
            memory += sum(chain.sizes[v] for v in lasting)
            touched = {v for k in group for v in (*items[k].reads, *items[k].writes)} & alive
            ended = {v for v in touched if not left.get(v, 0) and v not in chain.kept}
            alive -= ended
            memory -= sum(chain.sizes[v] for v in ended)
        return levels, groups

    def _together(self, fits: Callable[[Sequence[int]], bool]) -> Iterator[list[int]]:
        """Anchors alone, and groups of kernels of one place; each is handled before the next one is made."""
        anchors = [k for k, item in enumerate(self.chain.items) if not item.moves]
        for place in range(self.chain.places):
            group: list[int] = []
            for k in sorted(self.at[place]):
                if group and not fits([*group, k]):
                    yield group
                    group = []
                group.append(k)
            if group:
                yield group
            if place < len(anchors):
                yield [anchors[place]]


def arranged(chain: Chain, limit_bytes: int) -> Arrangement:
    """The best arrangement that is found.

    Args:
        limit_bytes: the most memory, or what the given order needs if that is more.
    """
    given = Arrangement(chain, chain.spots)
    limit = max(limit_bytes, _peak(given, limit_bytes))
    found = [_improved(given, limit)]
    for start in (_shifted(chain, late=False), _shifted(chain, late=True)):
        if _peak(start, limit) <= limit:
            found.append(_improved(start, limit))
    return min(found, key=lambda one: one.total)


def _peak(made: Arrangement, limit: int) -> int:
    return max(made.followed(limit)[0], default=0)


def _shifted(chain: Chain, *, late: bool) -> Arrangement:
    """Everything as early as possible, or as late."""
    made = Arrangement(chain, chain.spots)
    moving = [k for k, item in enumerate(chain.items) if item.moves]
    for k in reversed(moving) if late else moving:
        made.move(k, made.range_of(k)[late])
    return made


def _improved(made: Arrangement, limit: int) -> Arrangement:
    """The arrangement after all single moves that save bytes, as long as memory permits."""
    chain = made.chain
    for _ in range(ROUNDS):
        moved = False
        for k in (k for k, item in enumerate(chain.items) if item.moves):
            here = made.spots[k]
            first, last = made.range_of(k)
            saved: dict[int, int] = {}
            for place in sorted({p for p in _related(made, k) if first <= p <= last and p != here}):
                before = made.cost(here) + made.cost(place)
                after = made.cost_of(made.at[here] - {k}) + made.cost_of(made.at[place] | {k})
                if after < before:
                    saved[place] = before - after
            for place in sorted(saved, key=lambda p: -saved[p]):
                made.move(k, place)
                if _peak(made, limit) <= limit:
                    moved = True
                    break
                made.move(k, here)
        if not moved:
            break
    return made


def _related(made: Arrangement, k: int) -> Iterable[int]:
    """Places of kernels that share a tensor with an item."""
    chain = made.chain
    for v in (*chain.items[k].reads, *chain.items[k].writes):
        for other in (*chain.readers.get(v, ()), *((chain.maker[v],) if v in chain.maker else ())):
            if other != k and chain.items[other].moves:
                yield made.spots[other]
