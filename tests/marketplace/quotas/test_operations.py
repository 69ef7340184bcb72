"""Quotas as they are given, read, changed and taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marketplace.placement.capacity import GIB
from marketplace.providers import service as providers

if TYPE_CHECKING:
    from tests.marketplace.office import Answer, Caller, Office
    from tests.marketplace.yard import Yard

HALF = {"gpu_count": 4, "cpu_count": 16, "dram": 128 * GIB, "disk": 1024 * GIB}
DAY = 86_400


def give(office: Office, who: Caller, node_id: str, recipient: dict[str, str], **more: Any) -> Answer:
    body = {"name": "q", "node_id": node_id, "recipient": recipient, "resources": HALF, **more}
    return office.ask("quotas.create", body, who)


def listed(office: Office, who: Caller, selector: Any = "All") -> list[str]:
    answer = office.ask("quotas.list", {"selector": selector}, who)
    assert answer.status == 200, answer.body
    return [row["id"] for row in answer.body["quotas"]]


def test_life_of_a_quota(office: Office, yard: Yard) -> None:
    admin, ada, stranger = office.person("admin"), office.person(), office.person()
    team = office.team(ada, "research")
    node_id = yard.node()
    made = give(office, admin, node_id, {"TeamName": "Research"}, valid_till="2030-01-01T00:00:00Z")
    assert made.status == 200, made.body
    quota = made.body["quota"]
    assert quota["principal"] == {"Team": team.id} and quota["holder_name"] == "research"
    assert quota["budget"] == HALF and quota["consumed"] == dict.fromkeys(HALF, 0)
    assert (quota["active"], quota["billing_exempt"], quota["exclusive"]) == (True, True, False)
    assert quota["node_gpuvendor_kernel_module_support"] == "OpenOrProprietary"
    assert (quota["node_gpu_brand"], quota["node_cpu_brand"]) == ("H200", "EPYC 9654")
    assert quota["created_by_email"] == admin.email
    yard.instance(team, node_id, gpus=3, team=True)
    for who in (ada, team, admin, yard.operator(), office.person("readonly_admin")):
        assert listed(office, who) == [quota["id"]], who.email
    assert listed(office, stranger) == []
    assert listed(office, ada, {"ByTeamId": team.id}) == listed(office, admin, {"ByNodeId": node_id}) == [quota["id"]]
    assert office.ask("quotas.list", {"selector": {"ByTeamId": team.id}}, stranger).code == "NotTeamMember"
    seen = office.ask("quotas.list", {}, ada).body["quotas"][0]
    assert seen["created_by_email"] is None, "only those who operate the node read it"
    assert seen["consumed"]["gpu_count"] == 3

    more = {**HALF, "gpu_count": 8}
    changed = office.ask("quotas.update", {"quota_id": quota["id"], "resources": more, "valid_till": None}, admin)
    assert changed.status == 200, changed.body
    assert changed.body["quota"]["budget"] == more and changed.body["quota"]["valid_till"] is None
    assert changed.body["quota"]["name"] == "q", "what is left out stays"
    for _ in range(2):
        assert office.ask("quotas.revoke", {"quota_id": quota["id"]}, admin).body == {"quota_id": quota["id"]}
    assert office.ask("quotas.list", {}, ada).body["quotas"][0]["active"] is False
    again = office.ask("quotas.update", {"quota_id": quota["id"], "name": "r"}, admin)
    assert (again.status, again.code) == (400, "InvalidTransition")
    events = office.ask("events.list", {"selector": {"ByTeam": team.id}}, ada).body["events"]
    actions = [event["action"] for event in events if event["action"].startswith("quotas.")]
    assert actions == ["quotas.revoke", "quotas.update", "quotas.create"]


def test_a_quota_is_never_larger_than_what_its_node_has_for_it(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node()
    yard.instance(office.person(), node_id, gpus=3)
    refused = give(office, admin, node_id, {"UserId": ada.id}, resources={**HALF, "gpu_count": 6})
    assert (refused.status, refused.code, refused.param) == (400, "QuotaExceedsNode", "resources")
    details = refused.body["error"]["details"]
    assert details["largest"]["gpu_count"] == 5 and details["requested"]["gpu_count"] == 6
    first = give(office, admin, node_id, {"UserId": ada.id}).body["quota"]["id"]
    assert give(office, admin, node_id, {"UserId": ada.id}, resources={"gpu_count": 2}).code == "QuotaExceedsNode"
    yard.instance(ada, node_id, gpus=2)
    grown = {"quota_id": first, "resources": {**HALF, "gpu_count": 5}}
    assert office.ask("quotas.update", grown, admin).status == 200, "its own use counts once"
    grown["resources"] = {**HALF, "gpu_count": 6}
    assert office.ask("quotas.update", grown, admin).code == "QuotaExceedsNode"


def test_a_node_without_a_usable_disk_grants_none(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node(disk=0)
    refused = give(office, admin, node_id, {"UserId": ada.id})
    assert (refused.code, refused.body["error"]["details"]["largest"]["disk"]) == ("QuotaExceedsNode", 0)
    assert give(office, admin, node_id, {"UserId": ada.id}, resources={**HALF, "disk": 0}).status == 200


def test_a_quota_of_nothing_is_refused(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node()
    nothing = dict.fromkeys(HALF, 0)
    assert give(office, admin, node_id, {"UserId": ada.id}, resources=nothing).code == "EmptyQuota"
    quota_id = give(office, admin, node_id, {"UserId": ada.id}).body["quota"]["id"]
    refused = office.ask("quotas.update", {"quota_id": quota_id, "resources": nothing}, admin)
    assert (refused.status, refused.code, refused.param) == (400, "EmptyQuota", "resources")


def test_an_exclusive_quota_lets_no_other_beside_it(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node()
    assert give(office, admin, node_id, {"UserId": ada.id}, exclusive=True).status == 200
    refused = give(office, admin, node_id, {"UserId": office.person().id}, resources={"gpu_count": 1})
    assert (refused.code, refused.body["error"]["details"]["largest"]["gpu_count"]) == ("QuotaExceedsNode", 0)


def test_quotas_of_different_times_do_not_count_against_each_other(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node()
    till = "2027-06-01T00:00:00Z"
    whole = {**HALF, "gpu_count": 8}
    assert give(office, admin, node_id, {"UserId": ada.id}, resources=whole, valid_till=till).status == 200
    assert give(office, admin, node_id, {"UserId": ada.id}, resources=whole, valid_from=till).status == 200
    assert give(office, admin, node_id, {"UserId": ada.id}, resources={"gpu_count": 1}).code == "QuotaExceedsNode"


def test_what_cannot_be_given(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    for _ in range(2):
        office.team(ada, "twins")
    node_id = yard.node()
    late = {"valid_from": "2031-01-01T00:00:00Z", "valid_till": "2030-01-01T00:00:00Z"}
    for change, status, code, param in (
        ({"node_id": "nowhere"}, 404, "NodeNotFound", "node_id"),
        ({"recipient": {"TeamName": "nobody"}}, 404, "TeamNotFound", "recipient.TeamName"),
        ({"recipient": {"TeamId": "t"}}, 404, "TeamNotFound", "recipient.TeamId"),
        ({"recipient": {"UserId": "u"}}, 404, "UserNotFound", "recipient.UserId"),
        ({"recipient": {"TeamName": "twins"}}, 400, "ValidationFailed", "recipient.TeamName"),
        ({"valid_till": "2020-01-01T00:00:00Z"}, 400, "ValidationFailed", "valid_till"),
        (late, 400, "ValidationFailed", "valid_till"),
    ):
        answer = give(office, admin, **{"node_id": node_id, "recipient": {"UserId": ada.id}, **change})
        assert (answer.status, answer.code, answer.param) == (status, code, param), answer.body


def test_providers_give_what_is_theirs_to_whom_they_know(office: Office, yard: Yard) -> None:
    operator, ada = yard.operator(), office.person()
    team = office.team(ada, "customers")
    with office.database.write() as unit:
        other = providers.create(unit, name="zenith", now=office.clock(), random=office.random)
    node_id, foreign = yard.node(), yard.node("z01", provider_id=other.id)
    refused = give(office, operator, foreign, {"UserId": operator.id})
    assert (refused.status, refused.code) == (403, "NotNodeOperator")
    # A quota keeps its holder off every other node: nobody is given one by people whom they have nothing to do with.
    assert give(office, operator, node_id, {"UserId": ada.id}).code == "UserNotFound"
    assert give(office, operator, node_id, {"TeamId": team.id}).code == "TeamNotFound"
    with office.database.write() as unit:
        providers.add_customer(unit, yard.provider.id, ada.id, now=office.clock())
    assert give(office, operator, node_id, {"UserId": ada.id}, resources={"gpu_count": 1}).status == 200
    made = give(office, operator, node_id, {"TeamId": team.id}, resources={"gpu_count": 1})
    assert made.status == 200, made.body
    theirs = give(office, office.person("admin"), foreign, {"UserId": operator.id}).body["quota"]["id"]
    assert theirs in listed(office, operator), "they hold it"
    for name in ("quotas.update", "quotas.revoke"):
        answer = office.ask(name, {"quota_id": theirs}, operator)
        assert (answer.status, answer.code) == (403, "NotNodeOperator")
    unseen = give(office, office.person("admin"), foreign, {"UserId": ada.id}, resources={"gpu_count": 1})
    answer = office.ask("quotas.revoke", {"quota_id": unseen.body["quota"]["id"]}, operator)
    assert (answer.status, answer.code) == (404, "QuotaNotFound")


def test_pages_are_whole(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node()
    made = [
        give(office, admin, node_id, {"UserId": ada.id}, resources={"gpu_count": 1}).body["quota"]["id"]
        for _ in range(5)
    ]
    found: list[str] = []
    cursor = None
    for _ in range(3):
        page = office.ask("quotas.list", {"limit": 2, "cursor": cursor}, ada).body
        found += [row["id"] for row in page["quotas"]]
        cursor = page["next_cursor"]
    assert found == made[::-1] and cursor is None


def test_the_same_request_again_gives_one_quota(office: Office, yard: Yard) -> None:
    admin, ada = office.person("admin"), office.person()
    node_id = yard.node()
    body = {"name": "q", "node_id": node_id, "recipient": {"UserId": ada.id}, "resources": HALF}
    answers = [office.ask("quotas.create", body, admin, Idempotency_Key="k") for _ in range(2)]
    assert answers[0].body == answers[1].body and len(listed(office, ada)) == 1
