"""EngineCore: requests in, tokens out. Each step is decide → apply → prepare → launch → collect.

On a device that computes by itself the host is a step ahead: it decides and launches step N + 1 while step N runs, and
then collects step N. The tokens of step N are placeholders until then; what step N + 1 reads of them lies on the
device.

Single-threaded: one thread submits, aborts and steps. A request has exactly one end, whatever happens: stop, length,
abort or error. It may come at any moment, while steps are on their way too: results of work that became void carry an
old epoch and are dropped. Pages and rows are free at once, because whatever is launched later runs later.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine.batch import kv_tensors
from engine.config import EngineConfig
from engine.device import CpuDevice, Device, DeviceLostError
from engine.draft import draft_bytes, speculation
from engine.embedding import vector_size
from engine.ended import EndedRequests
from engine.exact import LoadedModel
from engine.first_token import FirstTokens
from engine.gauges import snapshot
from engine.intake import Intake, UnfitError
from engine.kv_cache import BlockPool
from engine.lora import adapters_of, enter, find, leave
from engine.metrics import EngineMetrics
from engine.pacing import Pacer
from engine.request import Draft, Request, RequestError
from engine.runner import Flight, Runner
from engine.sampler import BROKEN, Sampled
from engine.scheduler import Applied, Limits, Scheduler, decide
from engine.sizing import free_host_bytes, plan_kv
from engine.speculative import Guesser, most_sequences, standing
from engine.steps import make_steps
from engine.watchdog import InFlight
from engine.wire import (
    Counters,
    FinishReason,
    Progress,
    RefusalCode,
    Refused,
    Snapshot,
    Submit,
    TokenLogprobs,
    Usage,
)
from kernels.interface import Ops

log = logging.getLogger("engine.core")

NAP_S = 2e-4
"""Longest wait for the moment of the next launch, after which arrivals are read again."""
WATERMARK = 0.01
"""Part of the pages that an admission leaves free for the growth of running requests."""


class EngineCore:
    """One model's engine. `clock` gives seconds and never goes back; `sleep` lets some of them pass; `draw_seed` seeds
    requests that name no seed."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        ops: Ops | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        device: Device | None = None,
        free_bytes: int | None = None,
        guesser: Callable[[Request], Guesser] | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        """guesser: what guesses the tokens of requests in place of a lookup. draft: the draft model, where one does."""
        shape = model.config
        device = device or CpuDevice()
        plan = plan_kv(
            config,
            shape,
            packed=model.packed,
            device=device.name,
            free_bytes=free_host_bytes() if free_bytes is None else free_bytes,
            beside=draft_bytes(config, model, draft, device.name),
        )
        self.config = config
        self.ops = ops
        self.plan = plan
        self.epoch = str(uuid.uuid4())
        self.max_context = plan.max_context
        self.kv_tokens = plan.tokens
        self.vocab_size = shape.vocab_size
        self.dimensions = vector_size(model)
        self.metrics = EngineMetrics()
        self._eos_ids = shape.eos_token_ids
        self._clock = clock
        self._sleep = sleep
        self._draw_seed = draw_seed
        max_running = min(config.max_running, config.step_tokens)
        self._pool = BlockPool(plan.num_pages, plan.page_size, prefix_cache=config.prefix_cache)
        self._limits = Limits(
            step_tokens=config.step_tokens,
            max_running=max_running,
            page_size=plan.page_size,
            watermark=max(1, int(plan.num_pages * WATERMARK)),
            fast_share=config.fast_share,
            fast_tokens=config.fast_tokens,
        )
        self._scheduler = Scheduler(self._limits, self._pool)
        self._first_tokens = FirstTokens(config, self._scheduler)
        kv = kv_tensors(shape, num_pages=plan.num_pages, page_size=plan.page_size, dtype=plan.dtype, device=device.name)
        steps = make_steps(
            config,
            model,
            ops,
            kv,
            device,
            vocab_size=shape.vocab_size,
            max_running=max_running,
            max_context=plan.max_context,
            max_seqs=most_sequences(config, max_running),
        )
        self.steps = steps
        self.model, self.draft, self.device = model, draft, device
        self._lost: DeviceLostError | None = None
        self._runner = Runner(steps, device, max_running, plan.page_size)
        self._flights: deque[Flight] = deque()
        self._ahead = int(config.overlap and device.asynchronous and steps.overlaps)
        self._speculation = speculation(
            config, self._scheduler, steps.largest.max_seqs, guesser=guesser, draft=draft, device=device, clock=clock
        )
        self._pacer = Pacer(self._first_tokens.times) if config.just_in_time and self._ahead else None
        self._adapters = adapters_of(model)
        self._intake = Intake(
            shape.vocab_size, plan.max_context, steps.max_edits, shape.eos_token_ids, embeds=self.dimensions > 0
        )
        self._live: dict[str, Request] = {}
        self.ended = EndedRequests(config.usage_retention_s)
        self._arrivals = 0
        self._outbox: list[Progress] = []

    def submit(self, submit: Submit) -> Refused | None:
        """Queue a sequence; None: accepted. A known request_id, running or ended, is accepted and changes nothing."""
        request_id, params = submit.request_id, submit.params
        if request_id in self._live or request_id in self.ended:
            return None
        try:
            prompt, adapter = self._intake.read(submit), find(self._adapters, submit.adapter)
        except UnfitError as unfit:
            return self._refuse(request_id, unfit.code, str(unfit))
        if len(self._live) >= self._limits.max_running + self.config.max_queued:
            text = f"{len(self._live)} requests run or wait; the queue holds {self.config.max_queued}"
            return self._refuse(request_id, "queue_full", text)
        request = Request(
            request_id,
            prompt,
            params,
            limit=min(len(prompt) + params.max_tokens, self.max_context),
            arrival=self._arrivals,
            priority=submit.priority,
            salt=submit.salt,
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_ids=self._eos_ids,
            now=self._clock(),
            adapter=adapter,
        )
        if not submit.follows and (excess := self._first_tokens.excess(request)) > 0:
            target = f"the target of {self.config.target_ttft_ms:g} ms"
            text = f"its first token would come {excess:.3g} s too late for {target}"
            return self._refuse(request_id, "overloaded", text, excess)
        self._arrivals += 1
        self._live[request_id] = request
        self._scheduler.add(request)
        enter(adapter)
        return None

    def _refuse(self, request_id: str, code: RefusalCode, message: str, retry_after_s: float = 0.0) -> Refused:
        self.metrics.refused[code] = self.metrics.refused.get(code, 0) + 1
        return Refused(request_id, code, message, retry_after_s)

    def abort(self, request_id: str) -> None:
        """End a sequence now. The next step() returns a Progress "abort" with final counters, for one that has ended or
        is unknown too, so that whoever aborts always gets an answer."""
        request = self._live.get(request_id)
        if request is not None:
            self._end(request, "abort")
            return
        ended = self.ended.usage(request_id)
        counters = ended.counters if ended else Counters()
        self._outbox.append(Progress(request_id=request_id, counters=counters, finish_reason="abort"))

    def has_work(self) -> bool:
        """True when step() has something to compute, to wait for or to say."""
        return bool(self._live or self._outbox or self._flights or self._lost)

    def step(self) -> list[Progress]:
        """Launch one step if there is anything to compute, collect one that is due; return what there is to say, in
        order. Raises DeviceLostError once what a lost device took with it has been said."""
        if self._lost is not None:
            raise self._lost
        if self._early():
            said, self._outbox = self._outbox, []
            return said
        while self._flights and self._speculation is not None and self._speculation.waits:
            self._collect(self._flights.popleft())
        launched = bool(self._live) and self._launch()
        if self._flights and (len(self._flights) > self._ahead or not launched):
            self._collect(self._flights.popleft())
        said, self._outbox = self._outbox, []
        return said

    def _early(self) -> bool:
        """True when the step behind the one that runs is not due yet, after a short wait for it."""
        if self._pacer is None or not self._flights or not self._live:
            return False
        running = self._flights[0]
        left = self._pacer.due(running.shape, running.started) - self._clock()
        if left <= 0 or running.pending is None or running.pending.ready():
            return False
        self._sleep(min(left, NAP_S))
        return True

    def _launch(self) -> bool:
        """Decide, prepare and launch a step; False where all that is left to compute is on its way."""
        started = self._clock()
        self.ended.forget(started)
        applied = self._scheduler.apply(decide(self._scheduler.view(), self._limits, self._first_tokens.pace))
        if not applied.work:
            if not self._flights:
                raise RequestError(f"{len(self._live)} requests live, but none can be scheduled")
            return False
        drafts: list[Draft] = []
        if self._speculation is not None:
            drafts = self._speculation.draft(applied.work, self._first_tokens.pace)
            started += self._speculation.took
        flight = self._runner.prepare(applied, drafts)
        flight.started = started
        self._count(applied, flight.packed.tokens, started)
        try:
            self._runner.launch(flight)
        except Exception as error:  # a supervision boundary: whatever a model raises ends this step's requests only
            self._fail(flight, error)
            return True
        if self._pacer is not None and self._flights:
            running = self._flights[0].pending
            self._pacer.launched(self._clock() - started, late=running is not None and running.ready())
        self._flights.append(flight)
        return True

    def _fail(self, flight: Flight, error: Exception) -> None:
        log.error("a step of %d requests failed", len(flight.work), exc_info=error)
        for (request, _), epoch in zip(flight.work, flight.epochs, strict=True):
            if request.epoch == epoch:
                self._end(request, "error", error=f"the model failed: {type(error).__name__}: {error}")
        if self.device.lost(error):
            self._lost = DeviceLostError(f"the device is lost: {error}")

    def _count(self, applied: Applied, tokens: int, now: float) -> None:
        metrics = self.metrics
        metrics.steps += 1
        metrics.preemptions += len(applied.preempted)
        metrics.computed_tokens += tokens
        metrics.step_tokens.observe(tokens)
        for request in applied.admitted:
            if request.epoch == 0:  # it has not run before
                metrics.prompt_tokens += request.prompt_len
                metrics.cached_tokens += request.prompt_cached
                metrics.queue_seconds.observe(now - request.queued_at)

    def _collect(self, flight: Flight) -> None:
        """Wait for a step, append the sampled tokens and say so. Requests that have left since are passed over."""
        try:
            sampled = self._runner.collect(flight)
        except Exception as error:  # a supervision boundary, as at the launch
            self._fail(flight, error)
            return
        now = self._clock()
        self._first_tokens.times.finished(flight.shape, flight.started, now)
        self.metrics.last_step_ms = (now - flight.started) * 1e3
        self.metrics.step_ms.observe(self.metrics.last_step_ms)
        for index in flight.packed.landmarks:
            request = flight.work[index].request
            if request.epoch == flight.epochs[index]:
                self._scheduler.computed(request, int(flight.packed.lens[index]))
        self._say(flight, sampled, now)

    def _say(self, flight: Flight, sampled: Sampled, now: float) -> None:
        """Give each request its token. For hundreds in a step: what Request.sampled does is done here, in the loop."""
        if sampled.vectors:
            self._embedded(flight, sampled.vectors, now)
            return
        metrics, say, logprobs = self.metrics, self._outbox.append, sampled.logprobs
        raw = array("i", sampled.tokens).tobytes()
        speculating = self._speculation is not None
        at = 0
        chosen = sampled.tokens[: len(flight.sampling_epochs)] if flight.drafts else sampled.tokens
        for request, epoch, token in zip(flight.sampling, flight.sampling_epochs, chosen, strict=True):
            at += 4
            if request.epoch != epoch:
                continue
            if token == BROKEN:
                self._end(request, "error", error="the model's logits are not finite")
                continue
            tokens, prompt_len = request.tokens, request.prompt_len
            known = len(tokens) - request.ahead
            tokens[known] = token
            request.ahead -= 1
            known += 1
            metrics.completion_tokens += 1
            if known == prompt_len + 1:
                metrics.first_token_seconds.observe(now - request.queued_at)
            entry = [logprobs[at // 4 - 1]] if at // 4 - 1 in logprobs else None
            if token in request.stops:
                request.stop_token = token
                self._end(request, "stop", token=token, logprobs=entry)
            elif known == request.limit:
                self._end(request, "length", token=token, logprobs=entry)
            else:
                counters = Counters(prompt_len, request.prompt_cached, known - prompt_len, True)
                if speculating:
                    counters = request.counters
                say(Progress(request_id=request.request_id, tokens=raw[at - 4 : at], logprobs=entry, counters=counters))
        if flight.drafts:
            self._verify(flight, sampled)

    def _embedded(self, flight: Flight, vectors: Sequence[bytes], now: float) -> None:
        """Give each request its vector, which is its end: it has no tokens."""
        for request, epoch, vector in zip(flight.sampling, flight.sampling_epochs, vectors, strict=True):
            if request.epoch == epoch:
                self.metrics.first_token_seconds.observe(now - request.queued_at)
                broken = None if vector else "the model's vector is not finite"
                self._end(request, "error" if broken else "stop", error=broken, vector=vector or None)

    def _verify(self, flight: Flight, sampled: Sampled) -> None:
        """Give requests the tokens that were chosen behind right guesses."""
        at = len(flight.sampling_epochs)
        for request, guesses, epoch in flight.drafts:
            first, at = at, at + len(guesses)
            if request.epoch != epoch:
                self.metrics.rejected_tokens += len(guesses)
                continue
            stands = standing(request, guesses, sampled.tokens[first:at])
            self.metrics.accepted_tokens += stands
            self.metrics.rejected_tokens += len(guesses) - stands
            request.rejected += len(guesses) - stands
            self._runner.accept(request.row, stands)
            for row in range(first, first + stands):
                request.accepted += 1
                self._give(request, sampled.tokens[row], sampled.logprobs.get(row))

    def _give(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        """Give a request the token that was chosen behind its last one, which had been guessed."""
        if token == BROKEN:
            self._end(request, "error", error="the model's logits are not finite")
            return
        known = request.accept(token)
        self.metrics.completion_tokens += 1
        self._scheduler.computed(request, request.computed)
        entry = None if logprobs is None else [logprobs]
        if token in request.stops:
            request.stop_token = token
            self._end(request, "stop", token=token, logprobs=entry)
        elif known == request.limit:
            self._end(request, "length", token=token, logprobs=entry)
        else:
            new, counters = token.to_bytes(4, "little"), request.counters
            self._outbox.append(Progress(request_id=request.request_id, tokens=new, logprobs=entry, counters=counters))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        vector: bytes | None = None,
    ) -> None:
        """The only way out of the engine: frees row and pages, keeps the counters, says the end."""
        now = self._clock()
        if request.row >= 0:
            self._first_tokens.departs(now)
        self._scheduler.finish(request, reason)
        leave(self._adapters, request.adapter)
        del self._live[request.request_id]
        counters = request.counters
        self.ended.remember(request.request_id, counters, reason, now)
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        self._outbox.append(
            Progress(
                request_id=request.request_id,
                tokens=b"" if token is None else token.to_bytes(4, "little"),
                logprobs=logprobs,
                counters=counters,
                finish_reason=reason,
                stop_token=request.stop_token,
                error=error,
                vector=vector,
            )
        )

    def in_flight(self) -> list[InFlight]:
        """What the steps that run or were planned last compute."""
        return self._scheduler.in_flight()

    def usage(self, request_ids: Iterable[str]) -> dict[str, Usage]:
        """Counters of those requests that are known: live, or ended within the retention."""
        self.ended.forget(self._clock())
        known: dict[str, Usage] = {}
        for request_id in request_ids:
            if request_id in self._live:
                known[request_id] = Usage(self._live[request_id].counters, None)
            elif (ended := self.ended.usage(request_id)) is not None:
                known[request_id] = ended
        return known

    def snapshot(self, query_id: int = 0) -> Snapshot:
        """Queues and gauges now."""
        return snapshot(query_id, self.epoch, self._scheduler, self.metrics, self._first_tokens.wait_s())

    def check(self) -> None:
        """Prove pages, rows and queues consistent. Raises KVCacheError or RequestError naming what is wrong."""
        self._scheduler.check()
        queued = {request.request_id for request in (*self._scheduler.running, *self._scheduler.waiting)}
        if queued != set(self._live):
            raise RequestError(f"live requests and queues differ: {sorted(queued ^ set(self._live))[:8]}")
        if any(request_id in self.ended for request_id in self._live):
            raise RequestError("a request is both live and ended")

    @classmethod
    def load(cls, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> EngineCore:
        """Load the model that `config` names and return an engine that is warm. See engine.loading."""
        from engine.loading import load

        return load(config, clock=clock)
