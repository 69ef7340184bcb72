"""Which models have to make room for another one: the decision, without processes and clocks.

A model is awake (weights and KV cache in memory), asleep (its weights only, or nothing, where it sleeps without), or
away. Room is made at the cost of those that nobody uses: first they are put to sleep, the one used least recently
before the others; where that is not enough, they are unloaded in the same order. Nobody is disturbed in vain.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Act = Literal["sleep", "unload"]


class Rest(enum.StrEnum):
    """How much of a model is in memory."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    AWAY = "unloaded"


class Holding(NamedTuple):
    """What one model has of the memory, and what it would have."""

    name: str
    rest: Rest
    awake: int
    """Bytes while it is awake."""
    asleep: int
    """Bytes while it is asleep."""
    free: bool
    """Nobody uses it, and it may be put to sleep."""
    used_at: float
    """When it was used last, on any clock."""

    def bytes(self, rest: Rest) -> int:
        """Memory that it takes in this state."""
        return {Rest.AWAKE: self.awake, Rest.ASLEEP: self.asleep, Rest.AWAY: 0}[rest]


class Step(NamedTuple):
    """One model makes room."""

    name: str
    act: Act


class NeverFitsError(Exception):
    """A model is larger than the budget, whoever makes room."""


def room_for(name: str, holdings: Sequence[Holding], budget: int) -> list[Step] | None:
    """Who makes room so that `name` can be awake within `budget` bytes (0: without a limit), in the order in which they
    do; None while those who would have to are in use. Raises NeverFitsError.
    """
    wanted = next(holding for holding in holdings if holding.name == name)
    if not budget:
        return []
    if wanted.awake > budget:
        raise NeverFitsError(f"{name} takes {mib(wanted.awake)}, and all models together may take {mib(budget)}")
    others = [holding for holding in holdings if holding.name != name]
    becomes = {holding.name: holding.rest for holding in others}

    def excess() -> int:
        return wanted.awake + sum(holding.bytes(becomes[holding.name]) for holding in others) - budget

    idle = sorted((holding for holding in others if holding.free), key=lambda holding: holding.used_at)
    for deeper in (Rest.ASLEEP, Rest.AWAY):
        for holding in idle:
            if excess() <= 0:
                break
            if holding.bytes(deeper) < holding.bytes(becomes[holding.name]):
                becomes[holding.name] = deeper
    if excess() > 0:
        return None
    for holding in reversed(idle):  # who was used last is spared first
        for lighter in (Rest.AWAKE, Rest.ASLEEP):
            now, chosen = holding.rest, becomes[holding.name]
            if chosen is now or _depth(lighter) >= _depth(chosen) or _depth(lighter) < _depth(now):
                continue
            becomes[holding.name] = lighter
            if excess() <= 0:
                break
            becomes[holding.name] = chosen
    acts: dict[Rest, Act] = {Rest.ASLEEP: "sleep", Rest.AWAY: "unload"}
    return [Step(h.name, acts[becomes[h.name]]) for h in idle if becomes[h.name] is not h.rest]


def first_ones(holdings: Iterable[Holding], budget: int) -> list[str]:
    """Which models are loaded at the start: in their order, as many as there is room for. Raises NeverFitsError for one
    that has no room by itself."""
    chosen: list[str] = []
    taken = 0
    for holding in holdings:
        if budget and holding.awake > budget:
            room_for(holding.name, [holding], budget)
        if not budget or taken + holding.awake <= budget:
            taken += holding.awake
            chosen.append(holding.name)
    return chosen


def idle_act(holding: Holding, now: float, sleep_s: float, unload_s: float) -> Act | None:
    """What a model does that nobody has used for so long (0: never)."""
    if not holding.free:
        return None
    idle_s = now - holding.used_at
    if unload_s and idle_s >= unload_s and holding.rest is not Rest.AWAY:
        return "unload"
    if sleep_s and idle_s >= sleep_s and holding.rest is Rest.AWAKE:
        return "sleep"
    return None


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{-(-size // 2**20):,} MiB"


def _depth(rest: Rest) -> int:
    return (Rest.AWAKE, Rest.ASLEEP, Rest.AWAY).index(rest)
