"""Answer: the text of one sequence, made from the tokens that arrive for it.

Tokens become text when the consumer asks, all that has arrived in one go, so a consumer that flushes 20 times a
second pays for 20 rounds of detokenisation and not for one per token. With stop strings they become text on arrival,
because the engine, which never sees text, has to be told at once. Until it is read a delta grows in place: memory is
bounded by the answer.
"""

from __future__ import annotations

import msgspec

from engine.detokenizer import Detokenizer
from engine.sampling_params import SamplingParams
from engine.wire import Counters, FinishReason, Progress, TokenLogprobs, unpack_tokens


class Delta(msgspec.Struct):
    """What is new of answer `index`. The last one of each answer has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    """Tokens of the text, without the end-of-sequence or stop token. A token may come a little before its text."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token in token_ids, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer (None for the model's own end of sequence)."""
    vector: bytes | None = None
    """In the place of text, with the end: the embedding of the prompt, float32, little-endian."""


class Answer:
    """One sequence of a request: what arrived, what of it was read, and how it ended."""

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_eager",
        "_read",
        "_stop_tokens",
        "_tokens",
        "counters",
        "finished",
        "index",
        "request_id",
    )

    def __init__(self, index: int, request_id: str, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self.index = index
        self.request_id = request_id
        self.counters = Counters()
        """As last reported; cut to the token that completed the stop string once there is one."""
        self.finished = False
        """True once nothing more is to come (what came may still wait to be read)."""
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._detokenizer = detokenizer
        self._eager = bool(params.stop)
        self._tokens = b""
        self._delta = Delta(index, "", [])
        self._read = 0

    def take(self, said: Progress) -> bool:
        """Take in a Progress; return True when the answer is finished, by the engine or by a stop string."""
        self.counters = said.counters
        tokens, logprobs = said.tokens, said.logprobs
        if said.stop_token is not None:
            tokens = tokens[:-4]
            logprobs = logprobs[:-1] if logprobs is not None else None
        self._tokens = self._tokens + tokens if self._tokens else tokens
        if logprobs is not None:
            if self._delta.logprobs is None:
                self._delta.logprobs = logprobs
            else:
                self._delta.logprobs += logprobs
        if self._eager:
            self._to_text()
        if said.finish_reason is not None and not self.finished:
            self._end(said)
        return self.finished

    def read(self) -> Delta | None:
        """Return what is new; None when nothing is certain yet (half a character, what may become a stop string)."""
        self._to_text()
        delta = self._delta
        if not delta.text and delta.finish_reason is None:
            return None
        self._read += len(delta.token_ids)
        self._delta = Delta(self.index, "", [])
        return delta

    @property
    def unread(self) -> bool:
        """True when read() may have something."""
        return bool(self._tokens or self._delta.text) or self._delta.finish_reason is not None

    def _to_text(self) -> None:
        tokens = self._tokens
        if not tokens:
            return
        self._tokens = b""
        ids = unpack_tokens(tokens)
        delta, detokenizer = self._delta, self._detokenizer
        delta.token_ids += ids
        delta.text += detokenizer.push(ids)
        if detokenizer.stopped is not None:
            self._stop(detokenizer.stopped, detokenizer.consumed)

    def _end(self, said: Progress) -> None:
        self._to_text()
        self.finished = True
        delta, detokenizer = self._delta, self._detokenizer
        delta.text += detokenizer.finish()
        if detokenizer.stopped is not None:
            self._stop(detokenizer.stopped, detokenizer.consumed)
            return
        delta.finish_reason = said.finish_reason
        delta.vector = said.vector
        if said.stop_token in self._stop_tokens:
            delta.stop_reason = said.stop_token

    def _stop(self, stop: str, consumed: int) -> None:
        """End at a stop string: what the engine generated after it is neither shown nor counted."""
        self.finished = True
        delta, seen = self._delta, self.counters
        delta.finish_reason = "stop"
        delta.stop_reason = stop
        self.counters = msgspec.structs.replace(seen, completion=min(seen.completion, consumed))
        kept = max(0, consumed - self._read)
        del delta.token_ids[kept:]
        if delta.logprobs is not None:
            del delta.logprobs[kept:]
