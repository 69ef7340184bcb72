"""Who makes room for a model within a budget of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.budget import Holding, NeverFitsError, Rest, Step, first_ones, idle_act, room_for


def model(
    name: str, rest: Rest = Rest.AWAKE, awake: int = 10, asleep: int = 4, free: bool = True, used_at: float = 0
) -> Holding:
    return Holding(name, rest, awake, asleep, free, used_at)


A, B, C = model("a", used_at=1), model("b", used_at=2), model("c", used_at=3)
WANTED = model("new", Rest.AWAY)


def test_nobody_moves_where_there_is_room_or_no_limit() -> None:
    assert room_for("new", [A, B, C, WANTED], 40) == []
    assert room_for("new", [A, B, C, WANTED], 0) == []
    assert room_for("a", [A], 10) == [], "what it has itself is not in its way"


def test_the_one_used_least_recently_sleeps_first() -> None:
    assert room_for("new", [C, B, A, WANTED], 34) == [Step("a", "sleep")]
    assert room_for("new", [C, B, A, WANTED], 28) == [Step("a", "sleep"), Step("b", "sleep")]


def test_who_has_to_go_entirely_is_not_put_to_sleep_before() -> None:
    steps = room_for("new", [A, B, C, WANTED], 20)
    assert steps == [Step("a", "unload"), Step("b", "sleep"), Step("c", "sleep")]
    assert room_for("new", [A, WANTED], 10) == [Step("a", "unload")]
    sleeper = model("s", Rest.ASLEEP, used_at=0)
    assert room_for("new", [sleeper, WANTED], 13) == [Step("s", "unload")]


def test_who_is_in_use_stays_and_the_other_waits() -> None:
    busy = model("busy", free=False)
    assert room_for("new", [busy, WANTED], 19) is None
    assert room_for("new", [busy, WANTED], 20) == []
    assert room_for("new", [busy, A, WANTED], 24) == [Step("a", "sleep")]


def test_what_never_fits_is_said() -> None:
    with pytest.raises(NeverFitsError, match="huge takes 2 MiB, and all models together may take 1 MiB"):
        room_for("huge", [model("huge", awake=2 * 2**20)], 2**20)
    with pytest.raises(NeverFitsError):
        first_ones([A, model("huge", awake=99)], 50)


def test_the_first_ones_are_loaded_as_far_as_there_is_room() -> None:
    assert first_ones([A, B, C], 0) == ["a", "b", "c"]
    assert first_ones([A, model("large", awake=25), C], 30) == ["a", "c"]


@given(
    st.lists(
        st.tuples(st.sampled_from(Rest), st.integers(1, 20), st.integers(0, 20), st.booleans(), st.integers(0, 9)),
        max_size=5,
    ),
    st.integers(1, 20),
    st.integers(1, 80),
)
def test_it_fits_disturbs_nobody_in_use_and_nobody_in_vain(
    others: list[tuple[Rest, int, int, bool, int]], size: int, budget: int
) -> None:
    holdings = [
        Holding(str(i), rest, awake, min(awake, asleep), free, used)
        for i, (rest, awake, asleep, free, used) in enumerate(others)
    ]
    wanted = Holding("new", Rest.AWAY, size, 0, False, 0)
    if size > budget:
        with pytest.raises(NeverFitsError):
            room_for("new", [*holdings, wanted], budget)
        return
    steps = room_for("new", [*holdings, wanted], budget)
    least = size + sum(h.bytes(h.rest) for h in holdings if not h.free)
    if steps is None:
        assert least > budget, "it waits only where it has to"
        return
    after = {"sleep": Rest.ASLEEP, "unload": Rest.AWAY}

    def taken(done: list[Step]) -> int:
        rests = {step.name: after[step.act] for step in done}
        return size + sum(h.bytes(rests.get(h.name, h.rest)) for h in holdings)

    by_name = {h.name: h for h in holdings}
    assert taken(steps) <= budget
    assert all(by_name[step.name].free for step in steps)
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert taken([other for other in steps if other is not step]) > budget, "nobody in vain"
        if step.act == "unload" and by_name[step.name].rest is Rest.AWAKE:
            gentler = [other if other is not step else Step(step.name, "sleep") for other in steps]
            assert taken(gentler) > budget, "sleep would not have been enough"


@pytest.mark.parametrize(
    ("holding", "act"),
    [
        (model("m", used_at=91), None),
        (model("m", used_at=90), "sleep"),
        (model("m", Rest.ASLEEP, used_at=90), None),
        (model("m", Rest.ASLEEP, used_at=50), "unload"),
        (model("m", Rest.AWAY, used_at=0), None),
        (model("m", used_at=0, free=False), None),
    ],
)
def test_idle_models_sleep_and_then_go(holding: Holding, act: str | None) -> None:
    assert idle_act(holding, 100, sleep_s=10, unload_s=50) == act
    assert idle_act(holding, 1e9, sleep_s=0, unload_s=0) is None
