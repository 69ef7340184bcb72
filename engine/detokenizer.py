"""Incremental detokenisation: tokens in, text out as soon as it is certain, stop strings cut.

Two things hold text back: bytes that are not yet a whole UTF-8 character, and a tail that may be the beginning of a
stop string. Both are released by what follows or by finish(). The text is the same however the tokens are split into
calls, because tokens are taken one by one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from engine.vocabulary import Vocabulary


class HasVocabulary(Protocol):
    """A tokenizer, as far as its tokens' bytes go."""

    vocabulary: Vocabulary


class StopMatcher:
    """Finds the stop string that is completed first, one character at a time (Knuth, Morris and Pratt)."""

    __slots__ = ("_failure", "_first", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: not empty, each not empty. Of two that end at the same character the longer one counts."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)

    @property
    def held(self) -> int:
        """Characters at the end of what was fed that may begin a stop string."""
        return max(self._matched)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Take the next characters. Returns (characters of `text` up to the end of the stop string, that string) or
        None."""
        matched = self._matched
        if not any(matched) and self._first.isdisjoint(text):
            return None
        for at, char in enumerate(text):
            for index, stop in enumerate(self._stops):
                length, failure = matched[index], self._failure[index]
                while length and stop[length] != char:
                    length = failure[length - 1]
                if stop[length] == char:
                    length += 1
                if length == len(stop):
                    return at + 1, stop
                matched[index] = length
        return None


def _failure_table(stop: str) -> list[int]:
    """For every prefix, the length of its longest proper suffix that is a prefix as well."""
    table, length = [0] * len(stop), 0
    for at in range(1, len(stop)):
        while length and stop[length] != stop[at]:
            length = table[length - 1]
        if stop[length] == stop[at]:
            length += 1
        table[at] = length
    return table


class Detokenizer:
    """Text of one sequence. After a stop string has been found everything further is ignored."""

    __slots__ = (
        "_bytes", "_held", "_include_stop", "_matcher", "_rest", "_strip", "consumed", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: HasVocabulary,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """stop: strings that end the text; empty ones are ignored. include_stop: the text ends with the stop string
        instead of before it. skip_special: leave special tokens out of the text."""
        stops = [entry for entry in stop if entry] if stop else ()
        vocabulary = tokenizer.vocabulary
        self._bytes = vocabulary.plain_bytes if skip_special else vocabulary.all_bytes
        self._strip = vocabulary.strips_leading_space
        self._rest = b""
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text"""
        self.consumed = 0
        """Tokens taken, up to and including the one that completed the stop string"""

    def push(self, ids: Sequence[int]) -> str:
        """Take generated tokens and return the text that is now certain. Raises IndexError for an id not in the
        vocabulary."""
        if self.stopped is not None:
            return ""
        table = self._bytes
        if self._matcher is None:
            self.consumed += len(ids)
            return self._decode(table[ids[0]] if len(ids) == 1 else b"".join([table[index] for index in ids]))
        out: list[str] = []
        for index in ids:
            self.consumed += 1
            text = self._decode(table[index])
            if text:
                certain, ended = self._match(self._matcher, text)
                out.append(certain)
                if ended:
                    break
        return "".join(out)

    def finish(self) -> str:
        """Return the rest: no more tokens come. A broken character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._decode(b"", final=True)
        if self._matcher is None:
            return rest
        text, _ = self._match(self._matcher, rest)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, raw: bytes, final: bool = False) -> str:
        if self._rest:
            raw = self._rest + raw
        text, taken = codecs.utf_8_decode(raw, "replace", final)
        self._rest = b"" if taken == len(raw) else raw[taken:]  # the beginning of a character
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _match(self, matcher: StopMatcher, text: str) -> tuple[str, bool]:
        """Return what is certain of the held text and `text`, and whether a stop string is complete in it."""
        found = matcher.feed(text)
        joined = self._held + text
        if found is None:
            cut = len(joined) - matcher.held
            self._held = joined[cut:]
            return joined[:cut], False
        end, self.stopped = found
        self._held, end = "", len(joined) - len(text) + end
        return joined[: end if self._include_stop else end - len(self.stopped)], True
