"""What a scripted engine does: its script, and a core that follows it with a timer wheel instead of a model."""

from __future__ import annotations

import heapq
import math
import struct
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import xxhash

from engine.watchdog import InFlight
from engine.wire import (
    AdapterQuery,
    AdapterReply,
    Counters,
    FinishReason,
    Progress,
    Refused,
    Snapshot,
    Submit,
    TokenLogprobs,
    Usage,
    pack_tokens,
)


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a scripted engine behaves."""

    model: str = "scripted"
    """Name in the greeting."""
    tokens: int = 64
    """Tokens of an answer, a final `eos` included; a smaller max_tokens ends it with "length"."""
    first_token_ms: float = 0.0
    """Time from submit to the first token."""
    interval_ms: float = 0.0
    """Time from one token of a stream to its next; 0 is as fast as the connection takes them."""
    tick_ms: float = 1.0
    """Tokens that are due within one tick leave together in one frame, as those of one engine step do."""
    reply: tuple[int, ...] = ()
    """Answer with these tokens, over and over; empty draws them from the vocabulary by a hash of request and prompt."""
    eos: int | None = None
    """Token that ends an answer of full length."""
    vocab_size: int = 32_000
    """Tokens drawn are below this."""
    cached: int = 0
    """Prompt tokens reported as prefix-cache hits, at most all but one."""
    accepted: int = 0
    """Tokens of an answer reported as guessed before, at most all but the first."""
    rejected: int = 0
    """Guesses reported as dropped."""
    dimensions: int = 0
    """Answer with vectors of so many numbers, a hash of the prompt's tokens; 0 answers with tokens."""
    max_context: int = 8192
    """Most tokens of prompt and answer together."""
    kv_tokens: int = 65_536
    """Capacity in the greeting; not enforced."""
    max_running: int = 1_000_000
    """Streams that are answered at a time; the others wait."""
    max_queued: int = 1_000_000
    """Streams that wait at most; more are refused with queue_full."""
    refuse: Literal["", "queue_full", "overloaded", "too_long", "invalid", "draining"] = ""
    """Refuse every request with this code, ..."""
    retry_after_s: float = 0.0
    """... and this time to come back."""
    fail_token: int = -1
    """End a stream with finish_reason "error" in place of its token of this index; -1 never."""
    die_after_tokens: int = 0
    """Die without a word when this many tokens were said in all; 0 never."""
    stall_after_tokens: int = 0
    """Say nothing more when this many tokens were said in all; 0 never."""
    hang_after_tokens: int = 0
    """As a process: never come back from the step in which this many tokens were said in all, as with a device that
    hangs; 0 never."""
    start_ms: float = 0.0
    """As a process: time until the socket appears."""
    fail_start: str = ""
    """As a process: refuse to start with this message."""


class _Stream:
    """One request that runs or waits."""

    __slots__ = (
        "counters", "due", "finish", "length", "params", "prompt", "request_id", "said", "seed", "vector"
    )  # fmt: skip

    def __init__(self, submit: Submit, script: Script) -> None:
        self.request_id = submit.request_id
        self.params = submit.params
        self.prompt = len(submit.prompt) // 4
        room = min(submit.params.max_tokens, script.max_context - self.prompt)
        self.length = room if submit.params.ignore_eos else min(room, script.tokens)
        self.finish: FinishReason = "stop" if self.length < room else "length"
        self.seed = xxhash.xxh3_64_intdigest(submit.request_id.encode() + submit.prompt)
        self.said = 0
        self.due = 0.0
        self.counters = Counters(prompt=self.prompt)
        self.vector = _vector(submit.prompt, script.dimensions) if script.dimensions else None


def _vector(prompt: bytes, dimensions: int) -> bytes:
    """A vector of length 1 that follows from the prompt: float32, little-endian."""
    seed = xxhash.xxh3_64_intdigest(prompt)
    numbers = [(seed + k * 0x9E3779B97F4A7C15) % 2001 - 1000.5 for k in range(dimensions)]
    length = math.sqrt(sum(number * number for number in numbers))
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))


class ScriptedCore:
    """Follows a Script; the interface of an engine core. Times are seconds of the clock passed in.

    A stream costs one small object and one entry in the wheel: a dictionary from tick to the streams due in it.
    """

    RETAINED = 100_000

    def __init__(self, script: Script, clock: Callable[[], float] = time.monotonic) -> None:
        self.script = script
        self.epoch = uuid.uuid4().hex
        self.stalled = False
        self.must_die = False
        self.hangs = False
        self.asleep = False
        self._clock = clock
        self._live: dict[str, _Stream] = {}
        self._running = 0
        self._waiting: deque[_Stream] = deque()
        self._wheel: dict[int, list[_Stream]] = {}
        self._ticks: list[int] = []
        self._said: list[Progress] = []
        self._ended: OrderedDict[str, Usage] = OrderedDict()
        self.adapters: list[str] = []
        """Names of adapters that requests may ask for."""
        self._totals = Counters()
        self._steps = 0

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.script.max_context

    @property
    def kv_tokens(self) -> int:
        """Capacity in the greeting."""
        return self.script.kv_tokens

    @property
    def dimensions(self) -> int:
        """Numbers of a vector, 0 where there are none."""
        return self.script.dimensions

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.script.vocab_size

    def submit(self, submit: Submit) -> Refused | None:
        """Start or queue a stream, or refuse it as the script says."""
        script = self.script
        request_id = submit.request_id
        prompt = len(submit.prompt) // 4
        if script.refuse:
            return Refused(request_id, script.refuse, "the script says so", script.retry_after_s)
        if prompt == 0 or len(submit.prompt) % 4:
            return Refused(request_id, "invalid", "the prompt must have at least one token")
        if prompt >= script.max_context:
            return Refused(request_id, "too_long", f"{prompt} tokens are over the context of {script.max_context}")
        if submit.adapter and submit.adapter not in self.adapters:
            return Refused(request_id, "unknown_adapter", f"no adapter {submit.adapter} is loaded")
        if request_id in self._live:
            return None
        if self._running < script.max_running:
            self._live[request_id] = stream = _Stream(submit, script)
            self._start(stream)
        elif len(self._waiting) < script.max_queued:
            self._live[request_id] = stream = _Stream(submit, script)
            self._waiting.append(stream)
        else:
            return Refused(request_id, "queue_full", f"{len(self._waiting)} requests wait already")
        return None

    def abort(self, request_id: str) -> None:
        """End a live stream; the next step says so. Unknown ids are ignored."""
        stream = self._live.get(request_id)
        if stream is not None:
            self._end(stream, "abort", b"", None)

    def adapter(self, query: AdapterQuery, answer: Callable[[AdapterReply], None]) -> None:
        """Keep the names of adapters; a folder named "broken" cannot be read."""
        error = ""
        if query.folder.endswith("broken"):
            error = f"{query.folder}/adapter_config.json: cannot be read"
        elif query.folder and query.name not in self.adapters:
            self.adapters.append(query.name)
        elif query.name in self.adapters and not query.folder:
            self.adapters.remove(query.name)
        else:
            error = f"the adapter {query.name} is loaded already" if query.folder else f"no adapter {query.name}"
        answer(AdapterReply(query.query_id, list(self.adapters), error))

    def has_work(self) -> bool:
        """True when step() has something to say now."""
        return not self.stalled and (bool(self._said) or self.due_in() == 0.0)

    def due_in(self) -> float | None:
        """Seconds until step() has something to say; None while nothing is to come."""
        if self._said:
            return 0.0
        if not self._ticks:
            return None
        return max(0.0, self._ticks[0] * self.script.tick_ms / 1000 - self._clock())

    def step(self) -> list[Progress]:
        """One token for every stream that is due, and the ends of aborted ones."""
        if self.stalled:
            return []
        self._steps += 1
        now = self._clock()
        tick = int(now * 1000 / self.script.tick_ms + 1e-6)
        due: list[_Stream] = []
        while self._ticks and self._ticks[0] <= tick:
            due += self._wheel.pop(heapq.heappop(self._ticks))
        for stream in due:
            if self._live.get(stream.request_id) is stream:
                self._advance(stream)
        while self.hangs:
            time.sleep(60)
        said, self._said = self._said, []
        return said

    def in_flight(self) -> list[InFlight]:
        """The streams that are being answered."""
        return [
            InFlight(stream.request_id, stream.prompt, stream.prompt + stream.said, 1)
            for stream in self._live.values()
            if stream.counters.started
        ]

    def usage(self, request_ids: Sequence[str]) -> dict[str, Usage]:
        """Counters of the streams that are known."""
        known: dict[str, Usage] = {}
        for request_id in request_ids:
            live = self._live.get(request_id)
            usage = Usage(live.counters, None) if live is not None else self._ended.get(request_id)
            if usage is not None:
                known[request_id] = usage
        return known

    def snapshot(self, query_id: int) -> Snapshot:
        """Gauges, as far as a script has them: pages are of 16 tokens."""
        used = sum((s.counters.prompt + s.said + 15) // 16 for s in self._live.values())
        return Snapshot(
            query_id=query_id,
            epoch=self.epoch,
            running=self._running,
            waiting=len(self._waiting),
            queued_tokens=sum(s.prompt for s in self._waiting),
            kv_pages_total=self.script.kv_tokens // 16,
            kv_pages_used=used,
            kv_pages_cached=0,
            steps=self._steps,
            preemptions=0,
            prompt_tokens=self._totals.prompt,
            cached_tokens=self._totals.cached,
            completion_tokens=self._totals.completion,
            last_step_ms=0.0,
        )

    def rest(self, asleep: bool) -> None:
        """Nothing is in memory that could be given back."""
        self.asleep = asleep

    def resume(self) -> None:
        """End a stall for good."""
        self.script = msgspec.structs.replace(self.script, stall_after_tokens=0)
        self.stalled = False

    def check(self) -> None:
        """Raise AssertionError when the streams do not add up."""
        assert self._running + len(self._waiting) == len(self._live)
        assert not (self._waiting and self._running < self.script.max_running)
        assert sorted(self._wheel) == sorted(self._ticks)

    def _start(self, stream: _Stream) -> None:
        self._running += 1
        cached = min(self.script.cached, stream.prompt - 1)
        stream.counters = Counters(prompt=stream.prompt, cached=cached, started=True)
        self._add(prompt=stream.prompt, cached=cached)
        stream.due = self._clock() + self.script.first_token_ms / 1000
        self._schedule(stream)

    def _schedule(self, stream: _Stream) -> None:
        tick = math.ceil(stream.due * 1000 / self.script.tick_ms - 1e-6)
        if tick in self._wheel:
            self._wheel[tick].append(stream)
        else:
            self._wheel[tick] = [stream]
            heapq.heappush(self._ticks, tick)

    def _advance(self, stream: _Stream) -> None:
        script, index = self.script, stream.said
        if index == script.fail_token:
            self._end(stream, "error", b"", None, "the script says so")
            return
        if stream.vector is not None:
            self._end(stream, "stop", b"", None)
            return
        last = index + 1 >= stream.length
        token = self._draw(stream, index)
        stop_token: int | None = None
        if last and stream.finish == "stop" and script.eos is not None:
            token = stop_token = script.eos
        elif token in stream.params.stop_token_ids and index >= stream.params.min_tokens:
            stop_token, last, stream.finish = token, True, "stop"
        stream.said = index + 1
        before = stream.counters
        stream.counters = Counters(
            before.prompt, before.cached, index + 1, True, min(script.accepted, index), script.rejected
        )
        self._add(completion=1)
        tokens = pack_tokens((token,))
        if last:
            self._end(stream, stream.finish, tokens, stop_token)
        else:
            self._said.append(self._progress(stream, tokens))
            # Counted from when it was due, so that a late timer delays one token and not all that follow.
            stream.due += script.interval_ms / 1000
            self._schedule(stream)
        said = self._totals.completion
        self.must_die = 0 < script.die_after_tokens <= said
        self.hangs = 0 < script.hang_after_tokens <= said
        self.stalled = self.stalled or 0 < script.stall_after_tokens <= said

    def _draw(self, stream: _Stream, index: int) -> int:
        reply = self.script.reply
        if reply:
            return reply[index % len(reply)]
        return (stream.seed + index * 0x9E3779B97F4A7C15) % self.script.vocab_size

    def _progress(self, stream: _Stream, tokens: bytes) -> Progress:
        return Progress(
            request_id=stream.request_id,
            tokens=tokens,
            logprobs=self._logprobs(stream, tokens),
            counters=stream.counters,
        )

    def _logprobs(self, stream: _Stream, tokens: bytes) -> list[TokenLogprobs] | None:
        """Made up: the token drawn at -0.5, its k - 1 successors in the vocabulary at one less each."""
        if stream.params.logprobs is None or not tokens:
            return None
        token = int.from_bytes(tokens, "little", signed=True)
        size = self.script.vocab_size
        top = [((token + k) % size, -0.5 - k) for k in range(stream.params.logprobs)]
        return [TokenLogprobs(-0.5, top)]

    def _end(
        self, stream: _Stream, finish: FinishReason, tokens: bytes, stop_token: int | None, error: str | None = None
    ) -> None:
        del self._live[stream.request_id]
        if stream.counters.started:
            self._running -= 1
        else:
            self._waiting.remove(stream)
        self._ended[stream.request_id] = Usage(stream.counters, finish)
        if len(self._ended) > self.RETAINED:
            self._ended.popitem(last=False)
        self._said.append(
            Progress(
                request_id=stream.request_id,
                tokens=tokens,
                logprobs=self._logprobs(stream, tokens),
                counters=stream.counters,
                finish_reason=finish,
                stop_token=stop_token,
                error=error,
                vector=stream.vector if finish == "stop" else None,
            )
        )
        while self._waiting and self._running < self.script.max_running:
            self._start(self._waiting.popleft())

    def _add(self, prompt: int = 0, cached: int = 0, completion: int = 0) -> None:
        t = self._totals
        self._totals = Counters(
            prompt=t.prompt + prompt, cached=t.cached + cached, completion=t.completion + completion
        )
