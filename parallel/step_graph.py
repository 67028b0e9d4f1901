"""The time of a step as the longest path through a graph that is built once for each schedule, ranks and micro-batches.

For dualpipev and interleaved, whose step has no closed form here. Of a long step only a window is kept, with all of its
beginning and end; what is left out is the steady part, in which the rank that the path stays on works without a pause:
the longest path is looked for through a steady node of each rank, and stretched there by that rank's own work.
Not here: the schedules with a closed form (`parallel.step_time`), the times of single passes (`parallel.timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from parallel.instructions import Exchange, Pass, instructions, passes, rank_of, source

Edge = tuple[int, int]  # an earlier node, and which links' slowest transfer lies between


@dataclass
class Graph:
    """Nodes in an order in which each comes after what it needs; node 0 is the start."""

    works: list[tuple[tuple[str, int], ...]] = field(default_factory=lambda: [()])  # distinct runs of (kind, stage)
    links: list[tuple[int, ...]] = field(default_factory=lambda: [()])  # distinct sets of links, by their lower stage
    nodes: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)  # work, then three edges
    steady: list[tuple[int, int]] = field(default_factory=list)  # rank, node

    def seconds(self, forward_s: Sequence[float], backward_s: Sequence[float], send_s: Sequence[float]) -> _Longest:
        """The longest paths with these times."""
        by_kind = {"forward": forward_s, "backward": backward_s}
        work_s = [sum(by_kind[kind][stage] for kind, stage in work) for work in self.works]
        link_s = [max((send_s[stage] for stage in link), default=0.0) for link in self.links]
        return _Longest(self, work_s, link_s)


class _Longest:
    """Ends of all nodes from the start, and from there to the end of the step."""

    def __init__(self, graph: Graph, work_s: Sequence[float], link_s: Sequence[float]):
        self.graph, self.work_s, self.link_s = graph, work_s, link_s
        ends = [0.0]
        for work, a, by_a, b, by_b, c, by_c in graph.nodes:
            start, other = ends[a] + link_s[by_a], ends[b] + link_s[by_b]
            if other > start:
                start = other
            if c and (third := ends[c] + link_s[by_c]) > start:
                start = third
            ends.append(start + work_s[work])
        self.ends = ends

    def whole(self) -> float:
        return max(self.ends)

    def stretched(self, longer_s: Sequence[float]) -> float:
        """With rank r's steady part longer by longer_s[r]."""
        rest = self._rests()
        return max(self.ends[node] + rest[node] + longer_s[rank] for rank, node in self.graph.steady)

    def _rests(self) -> list[float]:
        work_s, link_s = self.work_s, self.link_s
        rest = [0.0] * len(self.ends)
        node = len(self.graph.nodes)
        for work, a, by_a, b, by_b, c, by_c in reversed(self.graph.nodes):
            from_start = rest[node] + work_s[work]
            node -= 1
            if (longer := from_start + link_s[by_a]) > rest[a]:
                rest[a] = longer
            if (longer := from_start + link_s[by_b]) > rest[b]:
                rest[b] = longer
            if c and (longer := from_start + link_s[by_c]) > rest[c]:
                rest[c] = longer
        return rest


@lru_cache(maxsize=64)
def graph_of(schedule: str, *, stages: int, ranks: int, num_micro_batches: int) -> Graph:
    """Built as the ranks would run it: each as far as it gets, then the next."""
    return _Builder(schedule, stages, ranks, num_micro_batches).build()


class _Builder:
    def __init__(self, schedule: str, stages: int, ranks: int, num_micro_batches: int):
        sizes = {"ranks": ranks, "num_micro_batches": num_micro_batches}
        self.programs: list[Sequence[Pass | Exchange]] = [
            instructions(schedule, rank=rank, **sizes)
            if schedule == "dualpipev"
            else passes(schedule, rank=rank, stages=stages, **sizes)
            for rank in range(ranks)
        ]
        self.schedule, self.stages, self.ranks = schedule, stages, ranks
        self.graph = Graph()
        self.works: dict[tuple[tuple[str, int], ...], int] = {(): 0}
        self.links: dict[tuple[int, ...], int] = {(): 0}
        self.last = [0] * ranks  # the node that each rank has come to
        self.before: list[tuple[tuple[str, int], ...]] = [()] * ranks  # the work of its last node
        self.at = [0] * ranks
        self.ended: dict[Pass, int] = {}
        self.posted: tuple[dict[Pass, int], dict[Pass, int]] = ({}, {})

    def build(self) -> Graph:
        moved = True
        while moved:
            moved = False
            for rank in range(self.ranks):
                while self.at[rank] < len(self.programs[rank]) and self._advance(rank):
                    moved = True
        assert all(at == len(program) for at, program in zip(self.at, self.programs, strict=True))
        self.graph.works, self.graph.links = list(self.works), list(self.links)
        return self.graph

    def _advance(self, rank: int) -> bool:
        program, at = self.programs[rank], self.at[rank]
        instruction = program[at]
        edges: dict[int, set[int]] | None = {self.last[rank]: set()}
        run: list[Pass] = []
        if isinstance(instruction, Exchange):
            edges = self._met(rank, instruction)
            at += 1
        elif self.schedule != "dualpipev":
            edges = self._fed(rank, instruction)
        if edges is None:
            return False
        # Where all that travels is exchanged, what runs up to the next exchange is one piece of work.
        while at < len(program) and isinstance(this := program[at], Pass):
            run.append(this)
            at += 1
            if self.schedule != "dualpipev":
                break
        self._add(rank, run, edges)
        self.at[rank] = at
        return True

    def _met(self, rank: int, exchange: Exchange) -> dict[int, set[int]] | None:
        """The nodes after which an exchange can happen; None where a peer has not come to it."""
        sides = ((0, exchange.sends), (1, exchange.receives))
        for side, messages in sides:
            for message in messages:
                self.posted[side].setdefault(message, self.last[rank])
        edges: dict[int, set[int]] = {self.last[rank]: set()}
        for side, messages in sides:
            for message in messages:
                peer = self.posted[1 - side].get(message)
                if peer is None:
                    return None
                for node in (peer, self.last[rank]):
                    edges.setdefault(node, set()).add(message.link)
        return edges

    def _fed(self, rank: int, this: Pass) -> dict[int, set[int]] | None:
        edges: dict[int, set[int]] = {self.last[rank]: set()}
        needed = source(this, stages=self.stages)
        if needed is not None:
            if needed not in self.ended:
                return None
            crosses = rank_of(self.schedule, needed.stage, ranks=self.ranks) != rank
            edges.setdefault(self.ended[needed], set()).update({needed.link} if crosses else ())
        return edges

    def _add(self, rank: int, run: Sequence[Pass], edges: dict[int, set[int]]) -> None:
        work = tuple((this.kind, this.stage) for this in run)
        joined = [(node, self._index(self.links, tuple(sorted(links)))) for node, links in edges.items()]
        assert len(joined) <= 3, "a rank meets the ranks on either side"
        joined += [(0, 0)] * (3 - len(joined))  # every node comes after the start
        (a, by_a), (b, by_b), (c, by_c) = joined
        self.graph.nodes.append((self._index(self.works, work), a, by_a, b, by_b, c, by_c))
        node = self.last[rank] = len(self.graph.nodes)
        for this in run:
            self.ended[this] = node
        if self._is_steady(rank, work):
            self.graph.steady.append((rank, node))
        self.before[rank] = work

    def _is_steady(self, rank: int, work: tuple[tuple[str, int], ...]) -> bool:
        """Whether the whole cycle of passes can come again after this node: it closes one."""
        two = (*self.before[rank], *work)
        if self.schedule == "dualpipev":
            there, back = rank, 2 * self.ranks - 1 - rank
            cycle = (("forward", there), ("backward", back), ("forward", back), ("backward", there))
            return two[-4:] in (cycle, cycle[2:] + cycle[:2])
        return [kind for kind, _ in two] == ["forward", "backward"]

    @staticmethod
    def _index(known: dict[tuple[int, ...], int] | dict[tuple[tuple[str, int], ...], int], key: object) -> int:
        return known.setdefault(key, len(known))  # type: ignore[arg-type]
