"""One request's money while it runs: what is held, what it has used so far, when to ask for more and when to stop.

Pure arithmetic on plain numbers; `meter.py` gives it memory, a journal and a clock.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from marketplace.ledger.money import Price, Tokens, cost_nano

SLICE = 1_024
"""Generated tokens per choice that one hold or extension covers."""
STOP_MARGIN = 64
"""Generated tokens per choice kept back, when no more money can be held, for what the engine makes before it has
stopped.
"""
CHECKPOINT_TOKENS = 256
CHECKPOINT_US = 5_000_000
"""A checkpoint after so many tokens or so long: one record for fifty tokens of a slow stream. What came after the last
one is known to the engine, and lost to the statistics only where that dies, too; what a crash ends is never charged."""


class Counted(Protocol):
    """Cumulative counters of one request, as the engine client keeps them."""

    @property
    def prompt(self) -> int:
        """Prompt tokens."""

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the prefix cache."""

    @property
    def completion(self) -> int:
        """Generated tokens, all choices together."""

    @property
    def started(self) -> bool:
        """True once any of the prompt was computed."""


def metered(counters: Counted) -> Tokens:
    """What a request has consumed: nothing at all while it only waited in the queue."""
    if not counters.started and counters.completion == 0:
        return Tokens()
    return Tokens(counters.prompt, min(counters.cached, counters.prompt), counters.completion)


def worst_cost(prompt: int, completion: int, price: Price) -> int:
    """The most that these tokens can cost, in nano-units, whichever part of the prompt turns out to be cached."""
    dearer = max(price.prompt, price.cached)
    return cost_nano(prompt, 0, completion, Price(dearer, dearer, price.completion))


class Cover(msgspec.Struct):
    """What a running request's hold pays for, and how far that reaches."""

    price: Price
    prompt: int
    """prompt tokens covered"""
    limit: int
    """most tokens the request may generate, all choices together"""
    choices: int
    completion: int
    """generated tokens covered, all choices together"""
    amount: int
    """nano-units held"""

    @classmethod
    def first(cls, price: Price, prompt: int, max_completion: int, choices: int) -> Cover:
        """The first slice: the prompt and min(max_completion, SLICE) tokens for each choice."""
        if prompt < 0 or max_completion < 0 or choices < 1:
            raise ValueError(f"{prompt} prompt tokens, {choices} choices of {max_completion} tokens")
        completion = min(max_completion, SLICE) * choices
        return cls(price, prompt, max_completion * choices, choices, completion, worst_cost(prompt, completion, price))

    def low(self, tokens: Tokens) -> bool:
        """True when a quarter of a slice or less is left of what could still be generated, or the prompt outgrew its
        estimate.
        """
        if tokens.prompt > self.prompt:
            return True
        return self.completion < self.limit and self.completion - tokens.completion <= SLICE * self.choices // 4

    def spent(self, tokens: Tokens) -> bool:
        """True when the request must stop now if no more money can be held."""
        return self.completion < self.limit and self.completion - tokens.completion <= STOP_MARGIN * self.choices

    def next(self, tokens: Tokens) -> Cover:
        """The cover after one more slice (or what is left to the limit), for the prompt as it turned out."""
        prompt = max(self.prompt, tokens.prompt)
        completion = min(self.limit, max(self.completion, tokens.completion) + SLICE * self.choices)
        return self._at(prompt, completion)

    def _at(self, prompt: int, completion: int) -> Cover:
        amount = max(self.amount, worst_cost(prompt, completion, self.price))
        return msgspec.structs.replace(self, prompt=prompt, completion=completion, amount=amount)
