"""Presets: captured by rentals of a shape of one's own, each shape once, listed and forgotten by whoever rented it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marketplace.operations import TABLE
from marketplace.presets import service
from marketplace.presets.service import Shape

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

SHAPE = Shape("h200-141gb", 1, 16, 64 << 30, 200 << 30)


def capture(office: Office, who: Caller, shape: Shape = SHAPE) -> None:
    with office.database.write() as unit:
        service.capture(unit, who.id, shape, now=office.clock(), random=office.random)


def test_a_shape_is_kept_once_for_each_person_and_forgotten(office: Office) -> None:
    ada, other = office.person(), office.person()
    for _ in range(3):
        capture(office, ada)
    capture(office, ada, Shape("h200-141gb", 1, 16, 64 << 30, 201 << 30))
    capture(office, other)
    newest, oldest = office.ask("instance_presets.list", {}, ada).body["presets"]
    assert (newest["disk"], oldest["disk"]) == (201 << 30, 200 << 30)
    assert oldest == {
        "id": oldest["id"],
        "instance_type": "h200-141gb",
        "cpu_count": 16,
        "dram": 64 << 30,
        "disk": 200 << 30,
        "gpu_count": 1,
    }
    foreign = office.ask("instance_presets.delete", {"id": oldest["id"]}, other)
    assert (foreign.status, foreign.code, foreign.param) == (404, "PresetNotFound", "id")
    assert office.ask("instance_presets.delete", {"id": oldest["id"]}, ada).body == {"id": oldest["id"]}
    assert [one["id"] for one in office.ask("instance_presets.list", {}, ada).body["presets"]] == [newest["id"]]
    assert len(office.ask("instance_presets.list", {}, other).body["presets"]) == 1
    first = office.ask("events.list", {}, ada).body["events"][0]
    assert (first["action"], first["subject_id"]) == ("presets.delete", oldest["id"])


def test_pages(office: Office) -> None:
    ada = office.person()
    for disk in range(3):
        capture(office, ada, Shape(None, 0, 1, 1 << 30, disk))
    first = office.ask("instance_presets.list", {"limit": 2}, ada).body
    second = office.ask("instance_presets.list", {"limit": 2, "cursor": first["next_cursor"]}, ada).body
    assert [one["disk"] for one in first["presets"] + second["presets"]] == [2, 1, 0]


def test_no_operation_makes_or_takes_one() -> None:
    named = {operation.name for operation in TABLE if "preset" in operation.path}
    assert named == {"instance_presets.list", "instance_presets.delete"}
    rent = next(operation for operation in TABLE if operation.name == "instances.rent")
    assert not [field for field in rent.request.model_fields if "preset" in field]
