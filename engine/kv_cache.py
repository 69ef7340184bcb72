"""Who owns which page of the KV cache, and which pages hold a prefix that can be used again. No tensors: page numbers
only.

Every page is in exactly one of three places:

    blank    owned by nobody, content worthless            → handed out first
    cached   owned by nobody, content findable by its hash → handed out when none is blank, least recently used first
    owned    in at least one table; refcount = number of tables that hold it; in more than one only when published

    allocate: blank|cached → owned     acquire: cached|owned → owned     release: owned → cached (published) | blank

A full page is published under a chained hash: xxh3-128 over the parent's digest and the page's raw int32 token ids, the
first parent being the tenant's salt. xxh3 is neither keyed nor collision-proof, so a digest only proposes: a hit is
taken when the page's salt, token ids and the identity of its parent are equal, which by induction proves the whole
prefix equal. Tables are append-only: an equal page computed twice stays in both tables and only the first is published,
so page numbers never change under a running sequence.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import xxhash

NO_CHAIN = -1
"""Parent identity of a page whose chain collided with another one: never published."""


class KVCacheError(AssertionError):
    """The page accounting contradicts itself: a defect of the engine."""


class OutOfPagesError(KVCacheError):
    """More pages were taken than the scheduler may plan for."""


class Match(NamedTuple):
    """A cached prefix: its pages in order, and the identity of the last one in the index (0: none)."""

    pages: list[int]
    uid: int


class PrefixKeys:
    """Digests of one sequence's full pages, computed once each and only as far as somebody asks."""

    __slots__ = ("digests", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.digests: list[bytes] = []


def xxh3(data: bytes) -> bytes:
    """128-bit xxh3 digest."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


class BlockPool:
    """Pages 0 … num_pages − 1 of `page_size` tokens each. `digest` can be replaced to force collisions in tests."""

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool = True, digest: Callable[[bytes], bytes] = xxh3
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages: {num_pages} pages of {page_size} tokens")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.refcounts = [0] * num_pages
        """tables that hold each page"""
        self._digest = digest
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._next_uid = 1
        # What a published page holds; uid 0 is "not published".
        self._uid = [0] * num_pages
        self._parent = [0] * num_pages
        self._key = [b""] * num_pages
        self._ids = [b""] * num_pages
        self._salt = [""] * num_pages

    @property
    def available(self) -> int:
        """Pages that can be handed out: blank and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages owned by nobody whose content can still be hit."""
        return len(self._cached)

    @property
    def owned(self) -> int:
        """Pages in at least one table."""
        return self.num_pages - len(self._blank) - len(self._cached)

    def match(self, keys: PrefixKeys, tokens: array[int]) -> Match:
        """Return the longest cached prefix of `tokens`, in whole pages, that leaves at least the last token to compute.

        (Somebody has to produce the logits of the last token.) Changes nothing: `acquire` takes the pages.
        """
        pages: list[int] = []
        uid = 0
        if not self.prefix_cache:
            return Match(pages, uid)
        for index in range((len(tokens) - 1) // self.page_size):
            ids = self._page_ids(tokens, index)
            page = self._index.get(self._key_of(keys, index, ids))
            if page is None or not self._is(page, keys.salt, uid, ids):
                break
            pages.append(page)
            uid = self._uid[page]
        return Match(pages, uid)

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a table to each of these published pages, as found by `match`."""
        for page in pages:
            if self.refcounts[page] == 0:
                del self._cached[page]
            self.refcounts[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages owned by the caller alone. Raises OutOfPagesError, changing nothing."""
        if count > self.available:
            raise OutOfPagesError(f"{count} pages wanted, {self.available} of {self.num_pages} available")
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _nothing = self._cached.popitem(last=False)
                self._forget(page)
            self.refcounts[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop a table. Published pages nobody else holds stay hittable; the tail goes first in the LRU order, because
        a page without its predecessors is of no use."""
        for page in reversed(pages):
            left = self.refcounts[page] - 1
            if left < 0:
                raise KVCacheError(f"page {page} released more often than it was taken")
            self.refcounts[page] = left
            if left == 0:
                if self._uid[page]:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def publish(self, page: int, index: int, keys: PrefixKeys, tokens: array[int], parent: int) -> int:
        """Make `page`, the full page number `index` of a sequence, findable; returns its identity, the parent of the
        next page.

        If an equal page is published already, that one's identity is returned and `page` stays private to its table.
        Returns NO_CHAIN, for this page and all that follow, when another prefix has the same digest.
        """
        if parent == NO_CHAIN or not self.prefix_cache:
            return NO_CHAIN
        ids = self._page_ids(tokens, index)
        key = self._key_of(keys, index, ids)
        known = self._index.get(key)
        if known is not None:
            return self._uid[known] if self._is(known, keys.salt, parent, ids) else NO_CHAIN
        uid = self._next_uid
        self._next_uid += 1
        self._index[key] = page
        self._uid[page], self._parent[page] = uid, parent
        self._key[page], self._ids[page], self._salt[page] = key, ids, keys.salt
        return uid

    def retract(self, pages: Iterable[int]) -> None:
        """Make these pages unfindable, except those that other tables share."""
        for page in pages:
            if self._uid[page] and self.refcounts[page] == 1:
                self._forget(page)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the accounting against the tables of all live sequences. Raises KVCacheError naming what is wrong."""
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise KVCacheError(f"a table holds a page twice: {list(table)}")
            held.update(table)
        for page in range(self.num_pages):
            if held[page] != self.refcounts[page]:
                raise KVCacheError(f"page {page} is in {held[page]} tables but has refcount {self.refcounts[page]}")
            if held[page] > 1 and not self._uid[page]:
                raise KVCacheError(f"page {page} is shared by {held[page]} tables without being published")
        blank, cached, owned = set(self._blank), set(self._cached), set(held)
        if len(blank) != len(self._blank) or blank & cached or blank & owned or cached & owned:
            raise KVCacheError("a page is in two places")
        if len(blank) + len(cached) + len(owned) != self.num_pages:
            raise KVCacheError(
                f"{len(blank)} blank + {len(cached)} cached + {len(owned)} owned ≠ {self.num_pages} pages"
            )
        published = {page for page in range(self.num_pages) if self._uid[page]}
        if published != set(self._index.values()) or len(published) != len(self._index):
            raise KVCacheError("the prefix index and the published pages differ")
        if any(self._index[self._key[page]] != page for page in published):
            raise KVCacheError("a published page is filed under another page's digest")
        if not cached <= published or blank & published:
            raise KVCacheError("a cached page cannot be found, or a blank one can")

    def _page_ids(self, tokens: array[int], index: int) -> bytes:
        return tokens[index * self.page_size : (index + 1) * self.page_size].tobytes()

    def _key_of(self, keys: PrefixKeys, index: int, ids: bytes) -> bytes:
        digests = keys.digests
        if index < len(digests):
            return digests[index]
        # Pages are asked for in order, so only the next digest can be missing.
        parent = digests[index - 1] if index else self._digest(b"salt:" + keys.salt.encode())
        digests.append(self._digest(parent + ids))
        return digests[index]

    def _is(self, page: int, salt: str, parent: int, ids: bytes) -> bool:
        return self._parent[page] == parent and self._ids[page] == ids and self._salt[page] == salt

    def _forget(self, page: int) -> None:
        del self._index[self._key[page]]
        self._uid[page] = self._parent[page] = 0
        self._key[page] = self._ids[page] = b""
        self._salt[page] = ""
