"""An engine that sleeps: it keeps its process and its weights, gives back everything else, and wakes in a moment.

Asleep, there is no core: no KV cache, no step tables, no graphs. The weights stay where they are on a CPU; a GPU's are
copied into pinned host memory and their device memory is freed. Waking brings them back and makes a core anew, of the
same size: loading and compiling, which take the time of a start, are not done again.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.core import EngineCore
from engine.lora import adapters_of
from engine.lora_loading import AdapterLoads, Answer
from engine.sizing import MIB
from engine.watchdog import InFlight
from engine.wire import AdapterQuery, AdapterReply, Progress, Refused, Snapshot, Submit, Usage

log = logging.getLogger("engine.rest")

RETRY_S = 1.0
"""When one who could not be woken is worth another try."""
NAP_S = 1e-3
"""Longest wait for an adapter that is read where there is nothing else to do, after which arrivals are read again."""


class RestingCore:
    """An EngineCore that may sleep; see engine.worker.LoadedCore. One thread calls all of it."""

    def __init__(self, core: EngineCore) -> None:
        """`core` is awake."""
        self._core: EngineCore | None = core
        self._model, self._draft = core.model, core.draft
        self._parked: ParkedWeights | None = None
        self._loads = AdapterLoads()
        self._last = core.snapshot(0)
        self._ended, self._metrics = core.ended, core.metrics
        self.max_context = core.max_context
        self.kv_tokens = core.kv_tokens
        self.vocab_size = core.vocab_size
        self.dimensions = core.dimensions
        self.epoch = core.epoch
        # The new one has the size of this one, whatever is free by then.
        plan = core.plan
        self._config = msgspec.structs.replace(
            core.config, kv_memory_mib=-(-plan.bytes // MIB), max_context=plan.max_context
        )
        self._ops, self._device = core.ops, core.device

    @property
    def asleep(self) -> bool:
        """True while there is no core."""
        return self._core is None

    @property
    def awake(self) -> EngineCore:
        """The core; who sleeps is woken."""
        if self._core is None:
            self.rest(False)
        assert self._core is not None, "it is awake now"
        return self._core

    def rest(self, asleep: bool) -> None:
        """Sleep or wake. ValueError while there are requests, or an adapter is read; RuntimeError of a device without
        room."""
        if asleep == self.asleep:
            return
        began = time.monotonic()
        if asleep:
            self._sleep()
        else:
            self._wake()
        log.info("%s in %.3f s", "asleep" if asleep else "awake", time.monotonic() - began)

    def _sleep(self) -> None:
        core = self._core
        assert core is not None, "it is awake"
        if core.has_work():
            raise ValueError("there are requests")
        if self._loads.busy:
            raise ValueError("an adapter is being loaded")
        self._last = core.snapshot(0)
        self._core = core = None
        # What was there at the start is out of the collector's sight, and a core refers to itself in places.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if self._device.name == "cpu":
            trim()
        else:
            self._parked = ParkedWeights(tensors_of([self._model, self._draft]))

    def _wake(self) -> None:
        if self._parked is not None:
            self._parked.bring_back()
            self._parked = None
        config = self._config
        core = EngineCore(
            config,
            self._model,
            self._ops,
            device=self._device,
            free_bytes=config.kv_memory_mib * MIB,
            draft=self._draft,
        )
        # What is known of earlier requests, and what was counted, goes on: it is the same process.
        core.epoch, core.ended, core.metrics = self.epoch, self._ended, self._metrics
        self._core = core

    # -- a core's own -----------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> Refused | None:
        """Queue a sequence, or say why not. Who sleeps is woken."""
        try:
            core = self.awake
        except RuntimeError as error:  # others have taken the device's memory since
            return Refused(submit.request_id, "overloaded", f"the engine cannot wake: {error}", RETRY_S)
        return core.submit(submit)

    def abort(self, request_id: str) -> None:
        """End a sequence."""
        self.awake.abort(request_id)

    def step(self) -> list[Progress]:
        """Run one step if there is work; an adapter that has been read is there from this step on."""
        core = self._core
        if core is None:
            return []
        self._loads.settle(0.0 if core.has_work() else NAP_S)
        return core.step()

    def has_work(self) -> bool:
        """True when step() has something to do."""
        return self._core is not None and (self._core.has_work() or self._loads.busy)

    def usage(self, request_ids: Sequence[str]) -> dict[str, Usage]:
        """Counters of requests, live or ended."""
        if self._core is not None:
            return self._core.usage(request_ids)
        return {name: usage for name in request_ids if (usage := self._ended.usage(name)) is not None}

    def snapshot(self, query_id: int) -> Snapshot:
        """Queues and gauges; asleep, there are no pages."""
        if self._core is not None:
            return self._core.snapshot(query_id)
        return msgspec.structs.replace(
            self._last, query_id=query_id, kv_pages_total=0, kv_pages_used=0, kv_pages_cached=0
        )

    def adapter(self, query: AdapterQuery, answer: Answer) -> None:
        """Load or unload an adapter; `answer` is called now or in a later step, before which it is in its place. Who
        sleeps is woken: weights are where they are used."""
        try:
            model = self.awake.model
        except RuntimeError as error:  # as above
            answer(AdapterReply(query.query_id, [], f"the engine cannot wake: {error}"))
            return
        self._loads.ask(adapters_of(model), query, answer)

    def in_flight(self) -> list[InFlight]:
        """What is being computed."""
        core = self._core
        return [] if core is None else core.in_flight()


class ParkedWeights:
    """Tensors whose memory is given back, and their content in host memory, pinned where there is a GPU."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy and free them. Tensors that share memory are parked once. RuntimeError where host memory does not do:
        then all are where they were."""
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        try:
            self._park(tensors)
        except RuntimeError:
            self.bring_back()
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _park(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.size():
                continue  # a part of one that is parked already
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.copy_(whole)
            storage.resize_(0)
            self._parked.append((storage, host))

    @property
    def bytes(self) -> int:
        """Memory that was given back."""
        return sum(host.numel() for _, host in self._parked)

    def bring_back(self) -> None:
        """Take memory again, and copy the content into it. RuntimeError where there is not enough."""
        for storage, host in self._parked:
            storage.resize_(host.numel())
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            whole.copy_(host, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def tensors_of(root: Any) -> list[Tensor]:
    """Every tensor that can be reached from an object through attributes and containers."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.append(thing)
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        elif not isinstance(thing, type | str | bytes | int | float):
            waiting += getattr(thing, "__dict__", {}).values()
            slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    return found


def trim() -> None:
    """Give what the allocator keeps back to the machine, where the C library can."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
