"""Turns: requests of one process that would plan the same thing at the same time do so one after another.

Whoever plans on a snapshot while another writes is overtaken, and plans again. In a line nobody is, and nothing is
worked out twice. A turn is no promise: what a plan was made from is compared when it is written, turn or not, and who
has waited for long goes ahead without one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 2.0
"""After so long somebody in a line goes ahead."""


class _Line:
    """Who has the turn, and who waits for it, first come first."""

    def __init__(self) -> None:
        self.holder: int | None = None
        self.waiting: deque[threading.Event] = deque()


class Turns:
    """Lines by what is planned in them. Safe to share between threads."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.ended = 0
        """How many turns have ended, in whichever line."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}

    @contextmanager
    def take(self, what: str, let_go: Callable[[], None], since: int | None = None) -> Iterator[None]:
        """Have the turn. Who has to wait for it lets go of what they saw first: it will be old. So does who need not
        wait, where turns have ended `since` they looked."""
        me = threading.get_ident()
        with self._lock:
            line = self._lines.setdefault(what, _Line())
            turn = None if line.holder in (None, me) else threading.Event()
            mine = line.holder is None
            if mine:
                line.holder = me
            elif turn is not None:
                line.waiting.append(turn)
            old = since is not None and self.ended != since
        try:
            if turn is not None:
                try:
                    let_go()
                    turn.wait(self._patience_s)
                finally:
                    mine = self._leave(line, turn, me)
            elif old:
                let_go()
            yield
        finally:
            if mine:
                self._pass_on(what, line)

    def _leave(self, line: _Line, turn: threading.Event, me: int) -> bool:
        """Wait no more; says whether the turn has come."""
        with self._lock:
            if not turn.is_set():
                line.waiting.remove(turn)
                return False
            line.holder = me
            return True

    def _pass_on(self, what: str, line: _Line) -> None:
        with self._lock:
            self.ended += 1
            if line.waiting:
                line.holder = -1  # on its way: nobody comes in between
                line.waiting.popleft().set()
            else:
                line.holder = None
                del self._lines[what]
