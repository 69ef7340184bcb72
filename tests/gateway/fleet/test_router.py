"""The router sends a request where the most of its prefix is cached and the least work waits."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.router import (
    COARSE_PAGES,
    FINE_PAGES,
    QUEUED_TOKENS,
    RUNNING_TOKENS,
    Gauges,
    Picture,
    Prefix,
    Router,
    Sent,
    prefix_of,
)

PAGE = 4
ROOM = 10_000

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)


def router(replicas: int = 2, routing: str = "prefix", places: int = 8) -> Router:
    made = Router(replicas, places, page_size=PAGE, routing=routing)  # type: ignore[arg-type]
    for index in range(replicas):
        made.joined(index, ROOM)
    return made


def prompt(*words: int, tail: int = 1) -> Prefix:
    """A prompt of a page for each word, and a tail."""
    return prefix_of([word for word in words for _ in range(PAGE)] + [99] * tail, "tenant", PAGE)


@given(prompts, prompts, st.sampled_from(["a", "b"]))
def test_digests_are_equal_exactly_as_far_as_prompts_are(one: list[int], other: list[int], salt: str) -> None:
    first, second = prefix_of(one, "a", PAGE), prefix_of(other, salt, PAGE)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    same = 0
    while same < min(len(first.digests), len(second.digests)) and first.digests[same] == second.digests[same]:
        same += 1
    assert len(first.digests) == (len(one) - 1) // PAGE, "a token is left to compute"
    expected = min(shared // PAGE, len(first.digests), len(second.digests)) if salt == "a" else 0
    assert same == expected
    assert not set(first.digests[same:]) & set(second.digests[same:])


@given(st.integers(1, FINE_PAGES * PAGE * 20))
@settings(max_examples=30)
def test_a_long_prompt_has_few_digests_which_end_on_pages(length: int) -> None:
    prefix = prefix_of(range(length), "", PAGE)
    count = len(prefix.digests)
    assert count <= FINE_PAGES + length // (PAGE * COARSE_PAGES)
    assert prefix.end(0) == 0 and prefix.end(count) < length
    ends = [prefix.end(index) for index in range(count + 1)]
    assert all((b - a) in (PAGE, PAGE * COARSE_PAGES) for a, b in pairwise(ends))
    assert prefix_of(range(length), "", PAGE) == prefix


@settings(max_examples=50)
@given(st.lists(st.tuples(prompts, st.sampled_from("ab")), max_size=40), st.integers(0, 12 * PAGE))
def test_a_picture_is_what_a_cache_of_that_size_holds(sends: list[tuple[list[int], str]], room: int) -> None:
    """Against the plainest model of a replica: pages by their whole prefix, used least recently goes first."""
    picture, pages = Picture(room), OrderedDict[tuple[str, tuple[int, ...]], None]()
    for tokens, salt in sends:
        prefix = prefix_of(tokens, salt, PAGE)
        names = [(salt, tuple(tokens[: (i + 1) * PAGE])) for i in range(len(prefix.digests))]
        hits = 0
        while hits < len(names) and names[hits] in pages:
            hits += 1
        assert picture.cached(prefix) == hits
        picture.remember(prefix)
        for name in reversed(names):
            pages[name] = None
            pages.move_to_end(name)
        while len(pages) * PAGE > room:
            pages.popitem(last=False)
        assert picture.tokens == len(pages) * PAGE <= room and len(picture) == len(pages)
    picture.clear()
    assert len(picture) == picture.tokens == 0


def test_the_digests_kept_are_bounded_whatever_room_there_is() -> None:
    picture = Picture(10**9, most_digests=10)
    for word in range(100):
        picture.remember(prompt(word, word + 1, word + 2))
    assert len(picture) == 10 and picture.tokens == 10 * PAGE


def test_a_prompt_goes_where_its_prefix_is() -> None:
    fleet = router(3)
    sent = fleet.send(1, prompt(1, 2, 3, 4), 1)
    fleet.ended(sent)
    assert fleet.choose(prompt(1, 2, 3, 9), range(3)) == 1
    assert fleet.choose(prompt(1, 2, 3, 9), (0, 2)) in (0, 2), "only among those that are asked about"
    assert fleet.choose(prefix_of([1] * PAGE + [2] * PAGE + [5], "another tenant", PAGE), range(3)) != 1


def test_work_that_waits_outweighs_a_prefix() -> None:
    fleet = router(2, places=4)
    fleet.ended(fleet.send(0, prompt(*range(100)), 1))
    warm = prompt(*range(100), 7)
    assert fleet.choose(warm, range(2)) == 0
    busy = [fleet.send(0, prompt(1000 + n), 1) for n in range(4)]
    assert fleet.choose(warm, range(2)) == 0, "four short requests do not delay it by as much as it saves"
    busy += [fleet.send(0, prompt(*range(2000, 2100)), 1)]
    assert fleet.choose(warm, range(2)) == 1
    for sent in busy:
        fleet.ended(sent)
    assert fleet.choose(warm, range(2)) == 0
    assert fleet.loads[0].work() == 0


def test_without_anything_known_it_is_the_least_work_and_then_each_in_turn() -> None:
    fleet = router(3)
    order = [fleet.send(fleet.choose(prompt(n), range(3)), prompt(n), 1).replica for n in range(6)]
    assert sorted(order[:3]) == sorted(order[3:]) == [0, 1, 2]
    with pytest.raises(ValueError, match="no replica"):
        fleet.choose(prompt(1), ())


def test_the_other_ways_of_routing_do_not_look_at_prefixes() -> None:
    turns = router(3, "round-robin")
    chosen = [turns.send(turns.choose(prompt(1, 2, 3), range(3)), prompt(1, 2, 3)).replica for _ in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]
    least = router(2, "least-work")
    least.ended(least.send(0, prompt(1, 2, 3)))
    least.send(1, prompt(5))
    assert least.choose(prompt(1, 2, 3), range(2)) == 0
    least.send(0, prompt(*range(9)))
    assert least.choose(prompt(1, 2, 3), range(2)) == 1


def test_what_the_counters_say_puts_the_picture_right() -> None:
    fleet = router(2)
    fleet.ended(fleet.send(0, prompt(1, 2, 3, 4)))
    fleet.ended(fleet.send(0, prompt(1, 2, 8)))
    sent = fleet.send(0, prompt(1, 2, 3))
    assert sent.cached == 3
    fleet.began(sent, cached_tokens=PAGE)
    picture = fleet.pictures[0]
    assert picture.cached(prompt(1, 2, 3)) == 3, "it was computed anew"
    assert fleet.loads[0].queued_tokens == 0 and fleet.loads[0].sequences == 1
    fleet.ended(sent)
    fleet.began(sent, 0)
    fleet.ended(sent)
    assert fleet.loads[0].work() == 0


def test_a_replica_that_was_lost_or_begins_anew_has_nothing() -> None:
    fleet = router(2)
    sent = fleet.send(1, prompt(1, 2, 3))
    assert fleet.choose(prompt(1, 2, 3, 4), range(2)) == 0 or fleet.pictures[1].cached(prompt(1, 2, 3)) == 3
    fleet.lost(1)
    assert sent.ended and fleet.loads[1].work() == 0 and fleet.pictures[1].cached(prompt(1, 2, 3)) == 0
    fleet.ended(sent)
    fleet.began(sent, 0)
    assert fleet.loads[1].work() == 0
    fleet.send(1, prompt(1))
    fleet.joined(1, 2 * PAGE)
    fleet.ended(fleet.send(1, prompt(1, 2, 3)))
    assert fleet.pictures[1].tokens == 2 * PAGE


def test_gauges_show_the_work_of_others_and_what_there_is_room_for() -> None:
    fleet = router(2)
    fleet.ended(fleet.send(0, prompt(1, 2, 3)))
    fleet.observe(0, Gauges(sequences=3, queued_tokens=50, cached_tokens=2 * PAGE))
    assert fleet.loads[0].work() == 50 + 3 * RUNNING_TOKENS
    assert fleet.pictures[0].tokens == 2 * PAGE
    fleet.observe(0, Gauges(sequences=9, queued_tokens=0, cached_tokens=ROOM))
    assert fleet.loads[0].work() == 9 * RUNNING_TOKENS + QUEUED_TOKENS
    fleet.observe(0, Gauges(0, 0, ROOM))
    assert fleet.loads[0].work() == 0


@given(st.data())
@settings(max_examples=25)
def test_the_work_adds_up_whatever_happens(data: st.DataObject) -> None:
    fleet, live = router(3), list[Sent]()
    for _ in range(data.draw(st.integers(0, 40))):
        kind = data.draw(st.sampled_from(["send", "began", "ended", "lost", "joined"]))
        if kind == "send":
            prefix = prefix_of(data.draw(prompts), "", PAGE)
            chosen = fleet.choose(prefix, range(3))
            costs = [
                fleet.loads[r].work() + prefix.tokens - prefix.end(fleet.pictures[r].cached(prefix)) for r in range(3)
            ]
            assert costs[chosen] == min(costs)
            live.append(fleet.send(chosen, prefix, data.draw(st.integers(1, 3))))
        elif kind in ("lost", "joined"):
            index = data.draw(st.integers(0, 2))
            if kind == "lost":
                fleet.lost(index)
            else:
                fleet.joined(index, data.draw(st.integers(0, 100)))
        elif live:
            sent = data.draw(st.sampled_from(live))
            if kind == "began":
                fleet.began(sent, data.draw(st.integers(0, 30)))
            else:
                fleet.ended(sent)
        for index, load in enumerate(fleet.loads):
            here = [sent for sent in live if sent.replica == index and not sent.ended]
            assert load.sequences == sum(sent.sequences for sent in here)
            assert load.queued_tokens == sum(sent.queued_tokens for sent in here)
            assert 0 <= fleet.pictures[index].tokens <= max(ROOM, fleet.pictures[index].most_tokens)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_router_needs_replicas_places_and_pages(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="replicas"):
        Router(wrong[0], wrong[1], page_size=wrong[2])
