"""Page accounting and the prefix index."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv_cache import NO_CHAIN, BlockPool, KVCacheError, Match, OutOfPagesError, PrefixKeys

PAGE = 4


def fill(pool: BlockPool, tokens: Sequence[int], salt: str = "") -> list[int]:
    """Compute `tokens` into pages, publishing what is full; returns the table."""
    ids = array("i", tokens)
    keys = PrefixKeys(salt)
    match = pool.match(keys, ids)
    pool.acquire(match.pages)
    table = match.pages + pool.allocate(-(-len(ids) // PAGE) - len(match.pages))
    parent = match.uid
    for index in range(len(match.pages), len(ids) // PAGE):
        parent = pool.publish(table[index], index, keys, ids, parent)
    return table


def hits(pool: BlockPool, tokens: Sequence[int], salt: str = "") -> list[int]:
    return pool.match(PrefixKeys(salt), array("i", tokens)).pages


def test_pages_move_between_blank_cached_and_owned() -> None:
    pool = BlockPool(4, PAGE)
    table = fill(pool, range(10))  # two full pages and a part
    assert (pool.owned, pool.cached, pool.available) == (3, 0, 1)
    pool.release(table)
    assert (pool.owned, pool.cached, pool.available) == (0, 2, 4)
    pool.check([])
    again = fill(pool, range(10))
    assert again[:2] == table[:2]
    pool.check([again])


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pool = BlockPool(4, PAGE)
    table = fill(pool, range(8))
    assert hits(pool, range(8)) == table[:1]
    assert hits(pool, range(9)) == table[:2]
    assert hits(pool, range(4)) == []


def test_tenants_do_not_share() -> None:
    pool = BlockPool(4, PAGE)
    table = fill(pool, range(8), salt="a")
    assert hits(pool, range(9), salt="a") == table
    assert hits(pool, range(9), salt="b") == []
    assert hits(pool, range(9)) == []


def test_a_prefix_must_match_from_its_beginning() -> None:
    pool = BlockPool(8, PAGE)
    table = fill(pool, range(12))
    assert hits(pool, [*range(4), 99, *range(5, 12), 0]) == table[:1]
    assert hits(pool, [99, *range(1, 12), 0]) == []
    assert hits(pool, range(4, 12)) == []


def test_blank_pages_go_first_then_the_least_recently_used_tail() -> None:
    pool = BlockPool(5, PAGE)
    old, new = fill(pool, range(8)), fill(pool, range(50, 58))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [({*range(5)} - {*old, *new}).pop()]
    assert pool.allocate(2) == [old[1], old[0]]
    assert hits(pool, range(9)) == []
    assert hits(pool, range(50, 59)) == new


def test_using_a_cached_page_makes_it_recent() -> None:
    pool = BlockPool(4, PAGE)
    a, b = fill(pool, range(8)), fill(pool, range(50, 58))
    pool.release(a)
    pool.release(b)
    pool.release(fill(pool, range(8)))
    pool.allocate(1)
    assert hits(pool, range(9)) == a
    assert hits(pool, range(50, 59)) == b[:1]


def test_shared_pages_are_freed_by_the_last_owner() -> None:
    pool = BlockPool(6, PAGE)
    first = fill(pool, range(9))
    second = fill(pool, range(9))
    assert second[:2] == first[:2] and second[2] != first[2]
    pool.check([first, second])
    pool.release(first)
    assert pool.refcounts[second[0]] == 1
    pool.check([second])


def test_an_equal_page_computed_twice_stays_private_and_the_chain_goes_on() -> None:
    pool = BlockPool(8, PAGE)
    ids = array("i", range(9))
    keys, other = PrefixKeys(""), PrefixKeys("")
    a, b = pool.allocate(3), pool.allocate(3)
    uid = pool.publish(a[0], 0, keys, ids, 0)
    assert pool.publish(b[0], 0, other, ids, 0) == uid
    assert pool.publish(b[1], 1, other, ids, uid) not in (uid, NO_CHAIN)
    assert hits(pool, range(9)) == [a[0], b[1]]
    pool.check([a, b])
    pool.release(b)
    assert pool.cached == 1
    pool.check([a])


def test_a_collision_of_digests_is_a_miss_and_ends_the_chain() -> None:
    pool = BlockPool(8, PAGE, digest=lambda data: b"same")
    table = fill(pool, range(4))
    assert hits(pool, range(50, 59)) == []
    ids = array("i", range(50, 58))
    keys = PrefixKeys("")
    pages = pool.allocate(2)
    assert pool.publish(pages[0], 0, keys, ids, 0) == NO_CHAIN
    assert pool.publish(pages[1], 1, keys, ids, NO_CHAIN) == NO_CHAIN
    assert hits(pool, range(5)) == table
    pool.check([table, pages])


def test_a_colliding_tenant_is_a_miss() -> None:
    pool = BlockPool(8, PAGE, digest=lambda data: b"" if data.startswith(b"salt:") else data)
    fill(pool, range(8), salt="a")
    assert hits(pool, range(9), salt="b") == []


def test_a_child_of_an_evicted_and_recomputed_parent_is_a_miss() -> None:
    pool = BlockPool(8, PAGE)
    table = fill(pool, range(8))
    pool.retract(table[:1])
    ids = array("i", range(9))
    again = pool.allocate(1)
    assert pool.publish(again[0], 0, PrefixKeys(""), ids, 0) > 0
    assert hits(pool, range(9)) == again


def test_retracted_pages_cannot_be_hit_but_shared_ones_stay() -> None:
    pool = BlockPool(8, PAGE)
    first = fill(pool, range(9))
    second = fill(pool, [*range(8), *range(20, 26)])
    pool.retract(second)
    assert hits(pool, range(9)) == first[:2]
    assert hits(pool, [*range(8), *range(20, 26)]) == first[:2]
    pool.check([first, second])


def test_prefix_cache_off_publishes_nothing() -> None:
    pool = BlockPool(4, PAGE, prefix_cache=False)
    pool.release(fill(pool, range(9)))
    assert (hits(pool, range(9)), pool.cached, pool.available) == ([], 0, 4)
    pool.check([])


def test_out_of_pages_changes_nothing() -> None:
    pool = BlockPool(3, PAGE)
    table = pool.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages wanted, 1 of 3"):
        pool.allocate(2)
    pool.check([table])


def test_a_pool_needs_pages() -> None:
    with pytest.raises(ValueError, match="needs pages"):
        BlockPool(0, PAGE)


def test_releasing_twice_is_seen() -> None:
    pool = BlockPool(3, PAGE)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(KVCacheError, match="released more often"):
        pool.release(table)


def test_check_sees_every_kind_of_damage() -> None:
    pool = BlockPool(4, PAGE)
    table = fill(pool, range(6))
    with pytest.raises(KVCacheError, match="is in 0 tables but has refcount 1"):
        pool.check([])
    with pytest.raises(KVCacheError, match="a page twice"):
        pool.check([table + table])
    private = table[1]
    pool.refcounts[private] = 2
    with pytest.raises(KVCacheError, match="without being published"):
        pool.check([table, [private]])
    pool.refcounts[private] = 1
    pool._blank.append(private)
    with pytest.raises(KVCacheError, match="in two places"):
        pool.check([table])
    pool._blank.remove(private)
    spare = pool._blank.pop()
    with pytest.raises(KVCacheError, match="≠ 4 pages"):
        pool.check([table])
    pool._blank.append(spare)
    pool._index[b"nothing"] = spare
    with pytest.raises(KVCacheError, match="index and the published pages differ"):
        pool.check([table])
    del pool._index[b"nothing"]
    pool.check([table])


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of starts, ends and growth keeps the accounting exact, and a hit is always the right prefix."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.live: list[tuple[list[int], list[int], str]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(target=tables, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from("ab"))
    def start(self, tokens: list[int], salt: str) -> int:
        ids = array("i", tokens)
        keys = PrefixKeys(salt)
        match: Match = self.pool.match(keys, ids)
        for index, page in enumerate(match.pages):
            assert self.content[page] == (salt, tuple(tokens[: (index + 1) * 2]))
        self.pool.acquire(match.pages)
        new = -(-len(tokens) // 2) - len(match.pages)
        if new > self.pool.available:
            self.pool.release(match.pages)
            return -1
        table = match.pages + self.pool.allocate(new)
        parent = match.uid
        for index in range(len(match.pages), len(tokens) // 2):
            self.content[table[index]] = (salt, tuple(tokens[: (index + 1) * 2]))
            parent = self.pool.publish(table[index], index, keys, ids, parent)
        self.live.append((table, tokens, salt))
        return len(self.live) - 1

    @rule(which=consumes(tables))
    def end(self, which: int) -> None:
        if which >= 0:
            table, _, _ = self.live[which]
            self.pool.release(table)
            self.live[which] = ([], [], "")

    @invariant()
    def accounts(self) -> None:
        self.pool.check(table for table, _, _ in self.live)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_every_full_page_before_the_last_token_is_hit(tokens: list[int]) -> None:
    pool = BlockPool(32, PAGE)
    fill(pool, tokens)
    lengths = [len(hits(pool, tokens[:n])) for n in range(1, len(tokens) + 1)]
    assert lengths == [(n - 1) // PAGE for n in range(1, len(tokens) + 1)]
