"""Adapters that come and go while steps run.

A folder may be large, and lie on a disk that is slow: a thread reads it, checks it and makes of it what steps use, one
folder at a time. The thread that steps only puts the finished tensors in their place, between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple

from engine.lora import AdapterError, Adapters, Prepared
from engine.weights.errors import WeightsError
from engine.wire import AdapterQuery, AdapterReply

log = logging.getLogger("engine.lora")

Answer = Callable[[AdapterReply], None]
"""Who asked for an adapter is told"""


class _Read(NamedTuple):
    """An adapter that is read, or waits for those before it."""

    adapters: Adapters
    query: AdapterQuery
    answer: Answer
    prepared: Future[Prepared]


class AdapterLoads:
    """Loads and unloads adapters as asked. All of it is called by the thread that steps."""

    def __init__(self) -> None:
        self._reads: deque[_Read] = deque()

    @property
    def busy(self) -> bool:
        """True while an adapter is read."""
        return bool(self._reads)

    def ask(self, adapters: Adapters | None, query: AdapterQuery, answer: Answer) -> None:
        """Load or unload. `answer` is called here and now, or by `settle` once an adapter has been read."""
        if adapters is None:
            answer(AdapterReply(query.query_id, [], "this engine takes no adapters: max_loras is 0"))
            return
        try:
            if any(read.query.name == query.name for read in self._reads):
                raise AdapterError(f"an adapter {query.name} is being loaded")
            if not query.folder:
                adapters.unload(query.name)
                answer(AdapterReply(query.query_id, adapters.names))
                return
            adapters.vacancy(query.name)  # so as not to read in vain
        except AdapterError as problem:
            answer(AdapterReply(query.query_id, adapters.names, str(problem)))
            return
        self._reads.append(_Read(adapters, query, answer, Future()))
        if len(self._reads) == 1:
            self._begin()

    def settle(self, limit_s: float = 0.0) -> None:
        """Put the adapter in its place that has been read, if there is one within so many seconds."""
        if not self._reads:
            return
        read = self._reads[0]
        if not wait([read.prepared], limit_s).done:
            return
        self._reads.popleft()
        if self._reads:
            self._begin()
        error = ""
        try:
            read.adapters.put(read.query.name, read.prepared.result())
        except (AdapterError, WeightsError) as problem:
            error = str(problem)
        except Exception as problem:  # a supervision boundary: whatever a folder does to its reader, steps go on
            log.exception("the adapter %s cannot be loaded", read.query.name)
            error = f"{type(problem).__name__}: {problem}"
        read.answer(AdapterReply(read.query.query_id, read.adapters.names, error))

    def _begin(self) -> None:
        """Have a thread read the next one; the process does not wait for it at its end."""
        read = self._reads[0]

        def work() -> None:
            try:
                read.prepared.set_result(read.adapters.read(Path(read.query.folder)))
            except BaseException as error:  # whoever settles gets it
                read.prepared.set_exception(error)

        threading.Thread(target=work, name="adapter", daemon=True).start()
