"""Which replica of a model gets a request: the one where the least is left to compute before its first token.

A replica's prefix cache cannot be asked on the way of a request, so the gateway keeps a picture of it: digests of the
prompts that it sent there, least recently used first, no more of them than the replica has room for. What a request
costs at a replica is

    its prompt tokens that are not in the picture + prompt tokens that wait there + what its running sequences delay

and the cheapest replica gets it. A short common prefix therefore draws requests together only until one replica has
clearly more to do, and a long one is worth a queue of its own length. Where nothing is known it is the least work. A
picture may be wrong: that costs time and never a wrong answer, and the counters that come back put it right.

Pure state: no clock, no process, no randomness. Its two ideas, the digests kept by the router and one sum of prefill
and decode work, are those of SGLang's cache-aware router and of Dynamo's KV router.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import xxhash

Routing = Literal["prefix", "least-work", "round-robin"]

FINE_PAGES = 256
"""So many pages of a prompt's beginning have a digest each; …"""
COARSE_PAGES = 16
"""… after them so many pages share one: long prompts differ early or late, and 100,000 tokens must be quick to look
up."""
MOST_DIGESTS = 65_536
"""Digests kept of one replica at most, whatever room it has."""
RUNNING_TOKENS = 64
"""A running sequence delays a prompt by what this many prompt tokens cost, …"""
QUEUED_TOKENS = 512
"""… and one that has no place yet by this many, its own prompt not counted."""


class Prefix(NamedTuple):
    """A prompt's digests: each stands for all tokens up to its end."""

    tokens: int
    """All of the prompt."""
    page_size: int
    digests: list[int]
    """Of its whole pages, as far as one token is left to compute."""

    def end(self, count: int) -> int:
        """Tokens that the first `count` digests stand for."""
        return self.page_size * (count + max(0, count - FINE_PAGES) * (COARSE_PAGES - 1))


def prefix_of(tokens: Sequence[int], salt: str, page_size: int) -> Prefix:
    """Digests of a prompt. Prompts share them under the same salt only, as they share pages in the replicas."""
    raw = array("i", tokens).tobytes()
    usable = (len(tokens) - 1) // page_size
    fine = min(usable, FINE_PAGES)
    stretches = [1] * fine + [COARSE_PAGES] * ((usable - fine) // COARSE_PAGES)
    digest = xxhash.xxh3_64_intdigest(salt.encode())
    digests: list[int] = []
    at, page_bytes = 0, 4 * page_size
    for pages in stretches:
        digest = xxhash.xxh3_64_intdigest(raw[at : at + pages * page_bytes], seed=digest)
        digests.append(digest)
        at += pages * page_bytes
    return Prefix(len(tokens), page_size, digests)


class Picture:
    """What is believed to be in one replica's prefix cache. A digest is dropped after all that were sent behind it."""

    def __init__(self, most_tokens: int, most_digests: int = MOST_DIGESTS) -> None:
        """`most_tokens` is what the replica has room for."""
        self.most_tokens = most_tokens
        self.most_digests = most_digests
        self.tokens = 0
        self._known: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Digests that are kept."""
        return len(self._known)

    def cached(self, prefix: Prefix) -> int:
        """How many of the prompt's digests are known, from the first one on."""
        known = self._known
        for count, digest in enumerate(prefix.digests):
            if digest not in known:
                return count
        return len(prefix.digests)

    def remember(self, prefix: Prefix) -> None:
        """The prompt is there now. Its end is dropped before its beginning, as the replica does."""
        known = self._known
        for index in range(len(prefix.digests) - 1, -1, -1):
            digest = prefix.digests[index]
            if digest in known:
                known.move_to_end(digest)
            else:
                known[digest] = size = prefix.end(index + 1) - prefix.end(index)
                self.tokens += size
        self.shrink(self.most_tokens)

    def forget(self, prefix: Prefix, count: int) -> None:
        """Of the prompt only the first `count` digests were there. What is known behind the others is not found until
        they are sent again."""
        for digest in prefix.digests[count:]:
            self.tokens -= self._known.pop(digest, 0)

    def shrink(self, tokens: int) -> None:
        """Drop what was used least recently until no more than this many tokens are believed to be there."""
        while self._known and (self.tokens > tokens or len(self._known) > self.most_digests):
            self.tokens -= self._known.popitem(last=False)[1]

    def clear(self) -> None:
        """Nothing is there: the replica has gone, or is a new process."""
        self._known.clear()
        self.tokens = 0


class Gauges(NamedTuple):
    """What a replica says about itself from time to time."""

    sequences: int
    """Running and waiting."""
    queued_tokens: int
    """Prompt tokens that wait to be computed."""
    cached_tokens: int
    """Tokens in pages that are in use or can be hit."""


class Load:
    """What one replica has to do, as far as this gateway knows."""

    def __init__(self, places: int) -> None:
        """`places` sequences run at once."""
        self.places = places
        self.sequences = 0
        """Sent and not ended."""
        self.queued_tokens = 0
        """Prompt tokens of requests that have not said their first token."""
        self.others = Gauges(0, 0, 0)
        """What its gauges show beyond that: requests of other gateways."""

    def work(self) -> int:
        """What is ahead of a new prompt, in prompt tokens."""
        sequences = self.sequences + self.others.sequences
        waiting = max(0, sequences - self.places)
        queued = self.queued_tokens + self.others.queued_tokens
        return queued + RUNNING_TOKENS * sequences + QUEUED_TOKENS * waiting


class Sent:
    """A request on its way to a replica: what it was believed to cost, until its first token and its end."""

    __slots__ = ("cached", "ended", "prefix", "queued_tokens", "replica", "sequences")

    def __init__(self, replica: int, prefix: Prefix, cached: int, sequences: int, queued_tokens: int) -> None:
        self.replica = replica
        self.prefix = prefix
        self.cached = cached
        """Digests that were believed to be there."""
        self.sequences = sequences
        self.queued_tokens = queued_tokens
        """Tokens of it that count as waiting; 0 from its first token on."""
        self.ended = False


class Router:
    """Sends requests to replicas 0 … n − 1."""

    def __init__(self, replicas: int, places: int, *, page_size: int = 16, routing: Routing = "prefix") -> None:
        """Each replica runs `places` sequences at once and keeps pages of `page_size` tokens."""
        if replicas < 1 or places < 1 or page_size < 1:
            raise ValueError(f"{replicas} replicas with {places} places and pages of {page_size} tokens")
        self.page_size = page_size
        self.routing = routing
        self.loads = [Load(places) for _ in range(replicas)]
        self.pictures = [Picture(0) for _ in range(replicas)]
        self._turn = 0
        self._sent: list[set[Sent]] = [set() for _ in range(replicas)]

    def joined(self, replica: int, kv_tokens: int) -> None:
        """A new process serves there, with room for this many tokens and nothing in it."""
        self.lost(replica)
        self.pictures[replica].most_tokens = kv_tokens

    def lost(self, replica: int) -> None:
        """Its process has gone with everything that it had and did."""
        self.pictures[replica].clear()
        self.loads[replica].others = Gauges(0, 0, 0)
        for sent in list(self._sent[replica]):
            self.ended(sent)

    def choose(self, prefix: Prefix, among: Collection[int]) -> int:
        """The replica that a request should go to. ValueError where there is none to choose from."""
        if not among:
            raise ValueError("there is no replica to choose from")
        count = len(self.loads)

        def in_turn(replica: int) -> int:
            return (replica - self._turn) % count

        if self.routing == "round-robin":
            return min(among, key=in_turn)

        def cost(replica: int) -> tuple[int, int]:
            work = self.loads[replica].work()
            if self.routing == "prefix":
                work += prefix.tokens - prefix.end(self.pictures[replica].cached(prefix))
            return work, in_turn(replica)

        return min(among, key=cost)

    def send(self, replica: int, prefix: Prefix, sequences: int = 1) -> Sent:
        """Note that a request of this many sequences goes to the replica, which computes what is not cached there."""
        picture, load = self.pictures[replica], self.loads[replica]
        cached = picture.cached(prefix)
        sent = Sent(replica, prefix, cached, sequences, prefix.tokens - prefix.end(cached))
        picture.remember(prefix)
        load.sequences += sequences
        load.queued_tokens += sent.queued_tokens
        self._sent[replica].add(sent)
        self._turn = (replica + 1) % len(self.loads)
        return sent

    def began(self, sent: Sent, cached_tokens: int) -> None:
        """Its first token is there, and how much of its prompt really was cached: less than believed is put right."""
        if sent.ended:
            return
        self.loads[sent.replica].queued_tokens -= sent.queued_tokens
        sent.queued_tokens = 0
        if cached_tokens < sent.prefix.end(sent.cached):
            # The pages had been dropped, or another request was still computing them. This one's are there now.
            picture = self.pictures[sent.replica]
            held = sent.cached
            while held and sent.prefix.end(held) > cached_tokens:
                held -= 1
            picture.forget(sent.prefix, held)
            picture.remember(sent.prefix)

    def ended(self, sent: Sent) -> None:
        """It has ended, however; a second call changes nothing."""
        if sent.ended:
            return
        sent.ended = True
        load = self.loads[sent.replica]
        load.sequences -= sent.sequences
        load.queued_tokens -= sent.queued_tokens
        self._sent[sent.replica].discard(sent)

    def observe(self, replica: int, gauges: Gauges) -> None:
        """Take what the replica says of itself: work that others gave it, and how much it can have in its cache."""
        load = self.loads[replica]
        load.others = Gauges(
            max(0, gauges.sequences - load.sequences), max(0, gauges.queued_tokens - load.queued_tokens), 0
        )
        self.pictures[replica].shrink(gauges.cached_tokens + load.queued_tokens)
