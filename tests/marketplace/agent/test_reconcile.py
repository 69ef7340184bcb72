"""The rules by which a node decides, one test each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marketplace.agent import reconcile
from marketplace.agent.drivers.base import Seen
from marketplace.agent.reconcile import SECOND, View, decide, observe
from marketplace.agent.records import Record
from marketplace.agent.wire import (
    ContainerSpec,
    Desired,
    DesiredInstance,
    Ending,
    Failure,
    Port,
    Settings,
    VmSpec,
)

NOW = 10_000 * SECOND
SSH = Port(22, 40022)


def spec(**fields: Any) -> VmSpec:
    return VmSpec(**{"name": "m", "vcpu": 1, "dram_bytes": 1 << 30, "disk_bytes": 1 << 30, **fields})


def wish(id: str = "a", want: Any = "Running", gen: int = 1, **fields: Any) -> DesiredInstance:
    return DesiredInstance(**{"id": id, "gen": gen, "want": want, "spec": spec(), **fields})


def record(id: str = "a", stage: Any = "Created", gen_applied: int = 1, **fields: Any) -> Record:
    given = {"id": id, "spec": spec(), "stage": stage, "created_at": 0, "gen_applied": gen_applied, **fields}
    return Record(**given)


def seen(id: str = "a", power: Any = "Running", **fields: Any) -> Seen:
    return Seen(id=id, kind="VirtualMachine", power=power, **fields)


def view(*, wanted: list[DesiredInstance] = [], there: list[Seen] = [], known: list[Record] = [], **rest: Any) -> View:  # noqa: B006
    desired = Desired(instances=wanted)
    fields = {"desired": desired, "seen": there, "records": {one.id: one for one in known}, "now": NOW, **rest}
    return View(**fields)


def test_a_failed_listing_decides_and_tells_nothing() -> None:
    blind = view(wanted=[wish(want="Absent"), wish("b")], known=[record()], seen=None)
    assert decide(blind) == []
    assert observe(blind, {}, []) is None


def test_nothing_is_decided_before_the_server_has_spoken_in_this_session() -> None:
    assert decide(view(there=[seen()], known=[record()], unknown={"a"}, desired=None)) == []


def test_what_was_never_made_is_made() -> None:
    assert decide(view(wanted=[wish()])) == [reconcile.Create(wish())]


def test_what_was_made_and_is_gone_is_missing_and_not_made_again() -> None:
    gone = view(wanted=[wish(gen=5)], known=[record()])
    assert decide(gone) == []
    told = observe(gone, {}, [])
    assert told is not None
    assert told.instances[0].phase == "Missing"


def test_a_creation_that_was_cut_off_is_finished() -> None:
    assert decide(view(wanted=[wish()], known=[record(stage="Creating")])) == [reconcile.Create(wish())]


def test_a_container_that_is_off_without_being_asked_is_inquired_into_once() -> None:
    box = ContainerSpec(name="c", image="i")
    off = Seen(id="a", kind="Container", power="Exited")
    known, asked = record(spec=box), [wish(spec=box)]
    assert decide(view(wanted=asked, there=[off], known=[known])) == [reconcile.Inquire("a")]
    assert decide(view(wanted=asked, there=[off], known=[known], busy={"a"})) == []
    ending = Ending(at=NOW, message="It ended.")
    found = view(wanted=asked, there=[off], known=[msgspec.structs.replace(known, ended=ending)])
    told = observe(found, {}, [])
    assert decide(found) == [] and told is not None
    assert (told.instances[0].phase, told.instances[0].ended) == ("Running", ending)
    assert decide(view(wanted=asked, there=[off], known=[record(spec=box, want="Stopped")])) == []
    assert decide(view(wanted=[wish()], there=[seen(power="Shutoff")], known=[record()])) == [], "a guest's own affair"
    running = msgspec.structs.replace(off, power="Running")
    told = observe(view(wanted=asked, there=[running], known=[msgspec.structs.replace(known, ended=ending)]), {}, [])
    assert told is not None and told.instances[0].ended is None, "it runs"


def test_nothing_new_begins_while_the_server_is_gone() -> None:
    assert decide(view(wanted=[wish()], connected=False)) == []


def test_a_machine_with_an_action_under_way_is_left_alone() -> None:
    assert decide(view(wanted=[wish(want="Absent", gen=2)], there=[seen()], known=[record()], busy={"a"})) == []


@pytest.mark.parametrize(
    ("want", "power", "step"),
    [
        ("Running", "Shutoff", "start"),
        ("Running", "Exited", "start"),
        ("Running", "Paused", "resume"),
        ("Running", "Running", None),
        ("Stopped", "Running", "stop"),
        ("Stopped", "Paused", "resume"),
        ("Stopped", "Shutoff", None),
        ("Paused", "Running", "pause"),
        ("Paused", "Paused", None),
        ("Paused", "Shutoff", None),
    ],
)
def test_a_new_wish_is_approached_one_step_of_power_at_a_time(want: Any, power: Any, step: Any) -> None:
    actions = decide(view(wanted=[wish(want=want, gen=2)], there=[seen(power=power)], known=[record()]))
    assert actions == [reconcile.Power("a", step) if step else reconcile.Applied("a", 2, want)]


def test_a_guest_that_shut_itself_down_stays_down() -> None:
    drifted = view(wanted=[wish()], there=[seen(power="Shutoff")], known=[record()])
    assert decide(drifted) == []
    told = observe(drifted, {}, [])
    assert told is not None
    assert told.instances[0].power == "Shutoff"


def test_a_reset_is_done_once_for_each_number() -> None:
    actions = decide(view(wanted=[wish(reset_seq=3)], there=[seen()], known=[record(reset_applied=2)]))
    assert actions == [reconcile.Reset("a", 3)]
    assert decide(view(wanted=[wish(reset_seq=3)], there=[seen()], known=[record(reset_applied=3)])) == []


def test_absent_destroys_with_the_graces_it_is_given() -> None:
    plain = view(wanted=[wish(want="Absent", gen=4)], there=[seen()], known=[record()])
    plain = msgspec.structs.replace(plain, settings=Settings(erase_grace_s=77))
    assert decide(plain) == [reconcile.Destroy("a", 77, 4)]
    own = view(wanted=[wish(want="Absent", gen=4, erase_after_s=0)], there=[seen()], known=[record()])
    assert decide(own) == [reconcile.Destroy("a", 0, 4)]


def test_absent_of_what_never_was_is_told_at_once() -> None:
    never = view(wanted=[wish(want="Absent", gen=2)])
    assert decide(never) == []
    told = observe(never, {}, [])
    assert told is not None
    assert (told.instances[0].phase, told.instances[0].gen_applied) == ("Absent", 2)


@pytest.mark.parametrize(
    ("age_s", "unknown", "rounds", "expected"),
    [
        (700, True, 1, reconcile.Destroy("a", 72 * 3600)),
        (700, True, 0, reconcile.Count("a", 1)),
        (500, True, 1, reconcile.Count("a", 0)),
        (700, False, 1, reconcile.Count("a", 0)),
        (700, False, 0, None),
    ],
)
def test_a_stray_needs_age_two_rounds_and_the_servers_word(
    age_s: int, unknown: bool, rounds: int, expected: Any
) -> None:
    stray = record(created_at=NOW - age_s * SECOND, stray_rounds=rounds)
    actions = decide(view(there=[seen()], known=[stray], unknown={"a"} if unknown else set()))
    assert actions == ([] if expected is None else [expected])


def test_a_labelled_machine_without_a_record_gets_one_first() -> None:
    assert decide(view(there=[seen()], unknown={"a"})) == [reconcile.Adopt(seen())]
    assert decide(view(wanted=[wish(reset_seq=2)], there=[seen()])) == [reconcile.Adopt(seen(), 2)]


def test_a_machine_that_is_wanted_again_stops_being_a_stray() -> None:
    assert decide(view(wanted=[wish()], there=[seen()], known=[record(stray_rounds=1)])) == [reconcile.Count("a", 0)]


def test_failed_is_told_only_when_its_remains_are_gone() -> None:
    failure = Failure(cause="BadImage", message="no such image")
    failing = view(wanted=[wish()], there=[seen()], known=[record(stage="Failing", error=failure)])
    assert decide(failing) == [reconcile.CleanUp("a")]
    told = observe(failing, {}, [])
    assert told is not None
    assert (told.instances[0].phase, told.instances[0].error) == ("Creating", None)
    failed = view(wanted=[wish()], known=[record(stage="Failed", error=failure)])
    assert decide(failed) == []
    told = observe(failed, {}, [])
    assert told is not None
    assert (told.instances[0].phase, told.instances[0].error) == ("Failed", failure)


def test_what_failed_and_is_not_wanted_any_more_is_absent_with_its_reason() -> None:
    failure = Failure(cause="BadImage", message="no such image")
    failed = view(wanted=[wish(want="Absent", gen=2)], known=[record(stage="Failed", error=failure)])
    assert decide(failed) == [reconcile.End("a", 2)]
    ended = view(wanted=[wish(want="Absent", gen=2)], known=[record(stage="Ended", gen_applied=2, error=failure)])
    assert decide(ended) == []
    told = observe(ended, {}, [])
    assert told is not None
    assert (told.instances[0].phase, told.instances[0].error) == ("Absent", failure)


def test_what_has_ended_is_forgotten_when_nobody_asks() -> None:
    assert decide(view(known=[record(stage="Ended")])) == [reconcile.Forget("a")]
    assert decide(view(wanted=[wish(want="Absent")], known=[record(stage="Ended")])) == []


def test_ports_of_a_running_machine_are_published_again() -> None:
    with_port = wish(spec=spec(ports=[SSH]))
    lost = view(wanted=[with_port], there=[seen()], known=[record()])
    assert decide(lost) == [reconcile.Publish("a", [SSH])]
    assert decide(view(wanted=[with_port], there=[seen(ports=[SSH])], known=[record()])) == []
    assert decide(view(wanted=[with_port], there=[seen(power="Shutoff")], known=[record()])) == []


def test_a_gpu_goes_to_one_machine_at_a_time() -> None:
    slot = "0000:65:00.0"
    first, second = (wish(id, spec=spec(gpus=[slot])) for id in "ab")
    assert decide(view(wanted=[first, second])) == [reconcile.Create(first)]
    holder = record("b", spec=spec(gpus=[slot]))
    assert decide(view(wanted=[first], known=[holder], there=[seen("b", gpus=[slot])], unknown={"b"})) == [
        reconcile.Count("b", 1)
    ]
    assert decide(view(wanted=[first], leased={slot})) == []


def test_a_gpu_is_the_same_by_slot_and_by_uuid() -> None:
    slots = {"GPU-1": "0000:65:00.0"}
    box = wish("b", spec=ContainerSpec(name="c", image="i", gpus=["GPU-1"]))
    assert decide(view(wanted=[box], leased={"0000:65:00.0"}, slots=slots)) == []
    assert decide(view(wanted=[box], slots=slots)) == [reconcile.Create(box)]


_POWERS = st.sampled_from(["Running", "Paused", "Shutoff", "Crashed", "NoState"])


@settings(max_examples=50, deadline=None)
@given(
    want=st.sampled_from(["Running", "Stopped", "Paused", "Absent"]),
    gen=st.integers(1, 3),
    power=st.none() | _POWERS,
    known=st.none() | st.sampled_from(["Creating", "Created", "Failing", "Failed", "Ended"]),
    applied=st.integers(0, 3),
    unknown=st.booleans(),
)
def test_a_wanted_machine_is_never_destroyed(
    want: Any, gen: int, power: Any, known: Any, applied: int, unknown: bool
) -> None:
    there = [] if power is None else [seen(power=power)]
    records = [] if known is None else [record(stage=known, gen_applied=applied)]
    actions = decide(
        view(wanted=[wish(want=want, gen=gen)], there=there, known=records, unknown={"a"} if unknown else set())
    )
    assert len(actions) <= 1
    destroys = any(isinstance(action, reconcile.Destroy) for action in actions)
    assert destroys == (want == "Absent" and (power is not None or known in ("Creating", "Created", "Failing")))
    if known in ("Created", "Failed", "Ended") and power is None:
        assert not any(isinstance(action, reconcile.Create) for action in actions)


def test_a_part_of_a_gpu_and_all_of_it_exclude_each_other_and_parts_beside_it_do_not() -> None:
    slots = {"GPU-1": "0000:65:00.0"}
    part, beside, whole = "GPU-1/0/3g.71gb", "GPU-1/4/3g.71gb", "GPU-1"

    def begun(wanted: str, *, has: str = "", leased: str = "") -> bool:
        there = [seen("b", gpus=[has])] if has else []
        known = [record("b", spec=spec(gpus=[has]))] if has else []
        wishes = [wish("a", spec=spec(gpus=[wanted]))] + [wish("b", spec=spec(gpus=[has])) for _ in there]
        around = view(wanted=wishes, there=there, known=known, slots=slots, leased=frozenset({leased} - {""}))
        return any(isinstance(one, reconcile.Create) and one.instance.id == "a" for one in decide(around))

    assert begun(part) and begun(part, has=beside)
    assert not begun(part, has=part) and not begun(part, has="0000:65:00.0/0/3g.71gb")
    assert not begun(part, has=whole) and not begun(whole, has=part) and not begun(part, leased="0000:65:00.0")
    both = view(wanted=[wish("a", spec=spec(gpus=[part])), wish("b", spec=spec(gpus=[whole]))], slots=slots)
    assert [one.instance.id for one in decide(both) if isinstance(one, reconcile.Create)] == ["a"]
