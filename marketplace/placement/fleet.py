"""The nodes as one process saw them last. Whatever changes what may be placed on a node raises its generation, but for
its agent falling silent, a drain and quotas that begin or end by themselves: what was made of a node is right for as
long as those are looked at beside it.

Where there are many nodes, a rental touches those alone that changed since the last one: the others stay in their
order, and nobody looks at them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from marketplace.placement import load
from marketplace.placement.view import NodeView
from marketplace.store.db import ReadUnit, WriteUnit

_SCORE = attrgetter("score")
FOREVER = 1 << 62


class _Seen(NamedTuple):
    """A node at a generation, and when that was known (µs)."""

    at: int
    view: NodeView

    def holds(self, now: int) -> bool:
        return self.at <= now < self.view.until


class _Line(NamedTuple):
    """The nodes of a type that took something new, by their marks, and in the order in which they are filled up."""

    seen: Mapping[str, _Seen]
    order: Sequence[NodeView]
    at: int
    until: int
    """all of them are right in between; each of them may be for longer"""

    def outdated(self, now: int) -> Collection[str]:
        """Those that are not right at a time."""
        if self.at <= now < self.until:
            return ()
        return [mark for mark, seen in self.seen.items() if not seen.holds(now)]

    def changed(self, gone: Collection[str], fresh: Mapping[str, _Seen]) -> _Line:
        """The line without some, and with others."""
        seen, order = dict(self.seen), [*self.order]
        for mark in gone:
            del order[bisect_left(order, seen.pop(mark).view.score, key=_SCORE)]
        for one in fresh.values():
            insort(order, one.view, key=_SCORE)
        seen.update(fresh)
        at = max((one.at for one in fresh.values()), default=0)
        until = min((one.view.until for one in fresh.values()), default=FOREVER)
        return _Line(seen, order, max(self.at, at), min(self.until, until))

    def of_these(self) -> _Line:
        """The line with times that are those of its nodes."""
        at = max((one.at for one in self.seen.values()), default=0)
        return self._replace(at=at, until=min((one.view.until for one in self.seen.values()), default=FOREVER))


class Fleet:
    """A copy of the nodes of one database that take something new. Safe to share between threads."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._learnt: dict[str, _Seen] = {}

    def taking(self, unit: ReadUnit, instance_type: str, now: int) -> Sequence[NodeView]:
        """The nodes of a type that take anything new at all, those first that are filled up first."""
        marks = load.taking(unit, instance_type)
        line = self._lines.get(instance_type, _Line({}, (), 0, FOREVER))
        outdated = line.outdated(now)
        gone = (line.seen.keys() - marks).union(outdated)
        missing = (marks - line.seen.keys()).union(marks.intersection(outdated))
        if not gone and not missing and not outdated:
            return line.order
        line = line.changed(gone, self._found(unit, missing, now))
        if not isinstance(unit, WriteUnit):  # its statements may see different moments, and may be taken back
            self._lines[instance_type] = line.of_these() if outdated else line
        return line.order

    def learn(self, view: NodeView, now: int) -> None:
        """Remember a node as whoever changed it last, and has committed that, knows it to be."""
        self._learnt[view.id] = _Seen(now, view)

    def _found(self, unit: ReadUnit, marks: Collection[str], now: int) -> dict[str, _Seen]:
        """Nodes by their marks: what was learnt of them, else what is read."""
        found = {}
        for mark in marks:
            learnt = self._learnt.get(load.marked(mark))
            if learnt is not None and load.mark(learnt.view) == mark and learnt.holds(now):
                found[mark] = learnt
        left = sorted(load.marked(mark) for mark in marks if mark not in found)
        if left:
            found.update((load.mark(view), _Seen(now, view)) for view in load.views(unit, now, left))
        return found
