"""A mistake in a body is told of the form that was meant, by the names that are in the body."""

from __future__ import annotations

from typing import Any

import pytest

from marketplace.http.dispatch import read_request
from marketplace.http.errors import Refusal
from marketplace.operations import TABLE

MODELS = {operation.name: operation.request for operation in TABLE}
ANYWHERE = {"ByInstanceTypeAndLocation": {"instance_type": "a.1"}}
BOX = {"Docker": {"image": "box"}}


def wrong(name: str, data: Any) -> list[tuple[str, str]]:
    with pytest.raises(Refusal) as caught:
        read_request(MODELS[name], data, {})
    assert caught.value.details is not None
    found = [(one["param"], one["message"]) for one in caught.value.details["errors"]]
    assert (caught.value.param, caught.value.message) == (found[0][0], ": ".join(found[0]))
    return found


def rent(**more: Any) -> dict[str, Any]:
    return {"selector": ANYWHERE, "config": BOX, **more}


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (rent(config={"Docker": {"image": "box", "ports": ["0"]}}), ["config.Docker.ports.0"]),
        (rent(config={"Docker": {"image": "box", "privileged": True}}), ["config.Docker.privileged"]),
        (rent(config={"Docker": {}}), ["config.Docker.image"]),
        (rent(config={"Docker": {"image": "box", "volumes": {"Mounts": [{}]}}}), None),
        (rent(config={"VirtualMachine": {"ssh_key": {"PublicKeys": ["x"]}}}), None),
        (rent(reservation={"New": {}}), ["reservation.New.type_id"]),
        (rent(selector={"ByNodeId": {"node_id": "n"}}), ["selector.ByNodeId.instance_type"]),
        (rent(selector={"ByNodeId": {"node_id": "n", "instance_type": "a.1"}, "x": 1}), ["selector.x"]),
        (rent(zz=1, name=5), ["name", "zz"]),
        ({"selector": ANYWHERE}, ["config"]),
    ],
    ids=lambda value: str(value)[-40:] if isinstance(value, dict) else "",
)
def test_the_form_that_was_meant_is_told_of(body: dict[str, Any], fields: list[str] | None) -> None:
    found = [field for field, _ in wrong("instances.rent", body)]
    if fields is None:
        assert found and all(field.count(".") >= 3 for field in found), found
    else:
        assert found == fields


@pytest.mark.parametrize(
    ("name", "body", "field", "choice"),
    [
        ("instances.rent", rent(config={}), "config", "VirtualMachine, Docker"),
        ("instances.rent", rent(config={"Podman": {}}), "config", "VirtualMachine, Docker"),
        ("instances.rent", rent(reservation={}), "reservation", "New, Existing"),
        (
            "quotas.create",
            {"name": "q", "node_id": "n", "recipient": {"Foo": "x"}, "resources": {}},
            "recipient",
            "TeamId, TeamName, UserId",
        ),
    ],
)
def test_who_names_no_form_is_told_which_there_are(name: str, body: Any, field: str, choice: str) -> None:
    assert wrong(name, body)[0] == (field, f"It should have exactly one of {choice}")


@pytest.mark.parametrize("selector", ["Some", 5, None, ["All"]])
def test_no_name_of_ours_is_told(selector: Any) -> None:
    for operation in ("instances.rent", "instances.list"):
        ((field, message),) = wrong(
            operation, {**(rent() if operation == "instances.rent" else {}), "selector": selector}
        )
        assert field == "selector" and "instance of" not in message


def test_every_status_that_there_is_is_told() -> None:
    ((field, message),) = wrong("instances.list", {"selector": {"ByStatus": {"statuses": ["Gone"]}}})
    assert field == "selector.ByStatus.statuses.0" and "'Failed'" in message
