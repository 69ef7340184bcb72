"""Networks: who adds, changes and removes them, who sees what of them, and which addresses they give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.networks import service as networks
from marketplace.networks.service import NetworkGoneError, NoAddressError, Proxy
from marketplace.networks.tables import ip_lease, network
from tests.marketplace.site import Site

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office

PROXY = {"http_proxy": "http://proxy:3128", "https_proxy": None, "no_proxy": ["10.0.0.0/8"], "docker_no_proxy": []}


@pytest.fixture
def admin(office: Office) -> Caller:
    return office.person("admin")


@pytest.fixture
def site(office: Office) -> Site:
    return Site(office)


def plan(name: str = "private-1", **more: Any) -> dict[str, Any]:
    return {"datacenter": "eu-1", "name": name, "netmask": 24, "iface": f"br-{name}"[:15], **more}


def add(site: Site, name: str = "private-1", who: Caller | None = None, **more: Any) -> str:
    answer = site.office.ask("networks.add", plan(name, **more), who or site.operator)
    assert answer.status == 201, answer.body
    return str(answer.body["id"])


def names(office: Office, who: Caller, selector: Any = "All") -> list[str]:
    answer = office.ask("networks.list", {"selector": selector}, who)
    assert answer.status == 200, answer.body
    return sorted(one["name"] for place in answer.body["networks"] for one in place["networks"])


def full(office: Office, who: Caller) -> dict[str, Any]:
    body = office.ask("networks.list", {}, who).body
    return {one["name"]: one for place in body["networks"] for one in place["networks"]}


def update(office: Office, who: Caller, name: str = "private-1", **what: Any) -> Answer:
    selector = {"ByDatacenterAndName": {"datacenter": "eu-1", "network": name}}
    return office.ask("networks.update", {"selector": selector, **what}, who)


def delete(office: Office, who: Caller, name: str = "private-1") -> Answer:
    selector = {"ByDatacenterAndName": {"datacenter": "eu-1", "network": name}}
    return office.ask("networks.delete", {"selector": selector}, who)


def leased(office: Office, network_id: str, instance_id: str, **more: Any) -> str:
    with office.database.write() as unit:
        return networks.join(unit, network_id, instance_id, now=office.clock(), random=office.random, **more)


def test_a_network_is_added_shown_changed_and_removed(office: Office, site: Site, admin: Caller) -> None:
    team = office.team(name="team-a")
    ranges = [
        {"from": "192.168.1.100", "to": "192.168.1.101", "external_from": "203.0.113.1", "external_to": "203.0.113.2"}
    ]
    made = add(site, team_name="TEAM-A", ip_ranges=ranges, gateway="192.168.1.1", proxy=PROXY, who=admin)
    shown = full(office, admin)["private-1"]
    assert shown == full(office, site.operator)["private-1"]
    assert (shown["id"], shown["team_id"], shown["team_name"]) == (made, team.id, "team-a")
    assert (shown["gateway"], shown["netmask"], shown["server_address"]) == ("192.168.1.1", 24, None)
    assert shown["ip_ranges"] == ranges and shown["executors"] == []
    assert shown["proxy"] == {**PROXY, "curl_no_proxy": []}
    assert update(office, site.operator, team={"ById": None}, proxy=None).body == {"updated_ids": [made]}
    shown = full(office, admin)["private-1"]
    assert (shown["team_id"], shown["team_name"], shown["proxy"]) == (None, None, None)
    assert update(office, admin, team_id=team.id).status == 200
    assert full(office, admin)["private-1"]["team_id"] == team.id
    assert delete(office, admin).body == {"deleted_ids": [made], "active_instance_count": 0}
    assert names(office, admin) == [] and delete(office, admin).code == "NetworkNotFound"
    actions = [event["action"] for event in office.ask("events.list", {"selector": "All"}, admin).body["events"]]
    assert [action for action in actions if action.startswith("networks.")] == [
        "networks.delete",
        "networks.update",
        "networks.update",
        "networks.add",
    ]


def test_the_gateway_is_optional_and_a_name_is_free_again_once_its_network_is_gone(office: Office, site: Site) -> None:
    add(site)
    again = office.ask("networks.add", plan(), site.operator)
    assert (again.status, again.code, again.param) == (409, "NameExists", "name")
    assert full(office, site.operator)["private-1"]["gateway"] is None
    assert delete(office, site.operator).status == 200
    add(site)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"datacenter": "nowhere"}, "DatacenterNotFound", "datacenter"),
    ({"team_id": "none"}, "TeamNotFound", "team_id"),
    ({"team_name": "none"}, "TeamNotFound", "team_name"),
    ({"team_id": "a", "team_name": "b"}, "ValidationFailed", "team_name"),
    ({"proxy": {"http_proxy": "http://u:p@x:1"}}, "ProxyCredentialsNotAllowed", "proxy.http_proxy"),
    ({"proxy": {"https_proxy": "http://u@x"}}, "ProxyCredentialsNotAllowed", "proxy.https_proxy"),
    ({"proxy": {"http_proxy": "ftp://proxy"}}, "ValidationFailed", "proxy.http_proxy"),
    ({"proxy": {"no_proxy": ["a;b"]}}, "ValidationFailed", "proxy.no_proxy.0"),
    ({"gateway": "192.168.1.999"}, "ValidationFailed", "gateway"),
    ({"netmask": 129}, "ValidationFailed", "netmask"),
    ({"iface": "a b"}, "ValidationFailed", "iface"),
    ({"ip_ranges": [{"from": "10.0.0.9", "to": "10.0.0.1"}]}, "ValidationFailed", "ip_ranges.0"),
    (
        {"gateway": "10.0.0.5", "ip_ranges": [{"from": "10.0.0.1", "to": "10.0.0.9"}]},
        "ValidationFailed",
        "ip_ranges.0",
    ),
]


def test_what_is_refused_names_the_field(office: Office, site: Site) -> None:
    for change, code, param in REFUSED:
        answer = office.ask("networks.add", {**plan(), **change}, site.operator)
        status = 404 if code.endswith("NotFound") else 400
        assert (answer.status, answer.code, answer.param) == (status, code, param), change
        office.wait(1)
    assert names(office, site.operator) == []


def test_a_name_that_several_teams_have_is_not_guessed(office: Office, site: Site, admin: Caller) -> None:
    for _ in range(2):
        office.team(name="twins")
    answer = office.ask("networks.add", plan(team_name="twins"), admin)
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "team_name")


def test_two_networks_on_one_interface_share_no_address(office: Office, site: Site) -> None:
    inside = [{"from": "10.0.0.10", "to": "10.0.0.20"}]
    add(site, "one", iface="br0", ip_ranges=inside)
    answer = office.ask(
        "networks.add", plan("two", iface="br0", ip_ranges=[{"from": "10.0.0.20", "to": "10.0.0.30"}]), site.operator
    )
    assert (answer.status, answer.code, answer.param) == (409, "InUse", "ip_ranges")
    add(site, "two", iface="br1", ip_ranges=inside)


def test_operators_manage_their_own_datacenters_and_nobody_elses(office: Office, site: Site) -> None:
    other = Site(office, "beta", datacenter="us-1")
    add(site)
    foreign = office.ask("networks.add", plan(), other.operator)
    assert (foreign.status, foreign.code, foreign.param) == (403, "PermissionDenied", "datacenter")
    for answer in (update(office, other.operator, proxy=None), delete(office, other.operator)):
        assert (answer.status, answer.code) == (403, "PermissionDenied")
    assert update(office, site.operator, team_id=office.team().id).status == 200
    # From here on the other provider does not see that there is such a network.
    for answer in (update(office, other.operator, proxy=None), delete(office, other.operator)):
        assert (answer.status, answer.code) == (404, "NetworkNotFound")


def test_renters_see_names_of_public_networks_and_of_their_teams(office: Office, site: Site, admin: Caller) -> None:
    ada, stranger = office.person(), office.person()
    team, foreign = office.team(owner=ada, name="ours"), office.team(name="theirs")
    add(site, "public")
    add(site, "ours", team_id=team.id)
    add(site, "theirs", team_id=foreign.id)
    assert names(office, admin) == names(office, site.operator) == ["ours", "public", "theirs"]
    assert names(office, ada) == names(office, team) == ["ours", "public"]
    assert names(office, stranger) == ["public"]
    seen = office.ask("networks.list", {}, ada).body["networks"]
    assert seen == [{"datacenter": "eu-1", "networks": [{"name": "ours"}, {"name": "public"}]}]
    assert {"ip_ranges", "executors", "gateway"} <= full(office, office.person("readonly_admin"))["theirs"].keys()
    assert names(office, Site(office, "beta", datacenter="us-1").operator) == ["public"]


def test_selectors(office: Office, site: Site, admin: Caller) -> None:
    ada = office.person()
    team, foreign = office.team(owner=ada, name="ours"), office.team(name="theirs")
    other = Site(office, "beta", datacenter="us-1")
    add(site, "public")
    add(site, "ours", team_id=team.id)
    add(site, "theirs", team_id=foreign.id)
    add(other, "far", datacenter="us-1")
    assert names(office, admin, {"ByTeamId": team.id}) == names(office, ada, {"ByTeamId": team.id}) == ["ours"]
    assert names(office, admin, {"ByProvider": "ACME"}) == ["ours", "public", "theirs"]
    assert names(office, ada, {"ByProvider": "acme"}) == ["ours", "public"]
    assert names(office, ada, {"ByDataCenter": ["US-1", "none"]}) == ["far"]
    # What a renter can use: unlike All, without the networks of other teams even for admins.
    assert names(office, admin, {"ByRenter": {"Team": team.id}}) == ["far", "ours", "public"]
    assert names(office, admin, {"ByRenter": {"User": ada.id}}) == ["far", "ours", "public"]
    assert names(office, ada, {"ByRenter": {"User": ada.id}}) == ["far", "ours", "public"]
    assert names(office, team, {"ByRenter": {"Team": team.id}}) == ["far", "ours", "public"]
    assert names(office, other.operator, {"ByRenter": {"Team": team.id}}) == ["far", "public"]


def test_others_matters_are_refused(office: Office) -> None:
    owner, stranger = office.person(), office.person()
    team = office.team(owner=owner)
    refused: list[tuple[Any, int, str, str]] = [
        ({"ByTeamId": team.id}, 403, "NotTeamMember", "selector.ByTeamId"),
        ({"ByRenter": {"Team": team.id}}, 403, "NotTeamMember", "selector.ByRenter.Team"),
        ({"ByRenter": {"User": owner.id}}, 403, "PermissionDenied", "selector.ByRenter.User"),
        ({"ByProvider": "none"}, 404, "ProviderNotFound", "selector.ByProvider"),
    ]
    for selector, *told in refused:
        answer = office.ask("networks.list", {"selector": selector}, stranger)
        assert [answer.status, answer.code, answer.param] == told, selector


def test_pages(office: Office, site: Site) -> None:
    for number in range(3):
        add(site, f"n{number}")
    first = office.ask("networks.list", {"limit": 2}, site.operator).body
    second = office.ask("networks.list", {"limit": 2, "cursor": first["next_cursor"]}, site.operator).body
    found = [one["name"] for body in (first, second) for place in body["networks"] for one in place["networks"]]
    assert found == ["n2", "n1", "n0"] and second["next_cursor"] is None


def test_addresses_are_given_in_their_order_and_come_back(office: Office, site: Site) -> None:
    ada, node = office.person(), site.node()
    made = add(site, ip_ranges=[{"from": "10.0.0.10", "to": "10.0.0.11"}, {"from": "10.0.0.9", "to": "10.0.0.9"}])
    one, two, three, late = (site.instance(node, ada) for _ in range(4))
    assert [leased(office, made, instance) for instance in (one, two, three)] == ["10.0.0.9", "10.0.0.10", "10.0.0.11"]
    with pytest.raises(NoAddressError):
        leased(office, made, late)
    executors = full(office, site.operator)["private-1"]["executors"]
    assert [(item["id"], item["ip"], item["owner_email"]) for item in executors] == [
        (one, "10.0.0.9", ada.email),
        (two, "10.0.0.10", ada.email),
        (three, "10.0.0.11", ada.email),
    ]
    used = delete(office, site.operator)
    assert (used.status, used.code, used.param) == (409, "NetworkInUse", "selector")
    assert used.body["error"]["details"] == {"active_instance_count": 3}
    with office.database.write() as unit:
        for _ in range(2):
            networks.release(unit, two, office.clock())
    assert leased(office, made, late) == "10.0.0.10"


def test_instances_that_are_over_are_not_in_a_network(office: Office, site: Site) -> None:
    ada, node = office.person(), site.node()
    made = add(site, ip_ranges=[{"from": "10.0.0.9", "to": "10.0.0.9"}])
    leased(office, made, site.instance(node, ada, status="Inactive"))
    assert full(office, site.operator)["private-1"]["executors"] == []
    assert delete(office, site.operator).status == 200


def test_who_wants_to_be_reached_from_outside_gets_an_address_that_is(office: Office, site: Site) -> None:
    ada, node = office.person(), site.node()
    made = add(
        site,
        proxy=PROXY,
        ip_ranges=[
            {"from": "10.0.0.9", "to": "10.0.0.9"},
            {"from": "10.0.0.20", "to": "10.0.0.20", "external_from": "203.0.113.7", "external_to": "203.0.113.7"},
        ],
    )
    first, second = site.instance(node, ada), site.instance(node, ada)
    assert leased(office, made, first, public=True) == "10.0.0.20"
    with pytest.raises(NoAddressError):
        leased(office, made, second, public=True)
    with office.database.read() as unit:
        (found,) = networks.joined(unit, [first]).values()
    assert (found.external_ip, found.netmask, found.iface) == ("203.0.113.7", 24, "br-private-1")
    assert found.proxy == Proxy(http_proxy="http://proxy:3128", no_proxy=["10.0.0.0/8"])


def test_who_joins_while_a_network_is_removed_comes_before_it_or_not_at_all(office: Office, site: Site) -> None:
    made = add(site, ip_ranges=[{"from": "10.0.0.9", "to": "10.0.0.9"}])
    instance = site.instance(site.node(), office.person())
    assert delete(office, site.operator).status == 200
    with pytest.raises(NetworkGoneError):
        leased(office, made, instance)


def test_of_many_who_join_at_once_each_has_an_address_of_its_own(office: Office, site: Site) -> None:
    ada, node = office.person(), site.node()
    made = add(site, ip_ranges=[{"from": "10.0.0.1", "to": "10.0.0.5"}])
    instances = [site.instance(node, ada) for _ in range(8)]

    def work(instance: str) -> str | None:
        try:
            return leased(office, made, instance)
        except NoAddressError:
            return None

    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(work, instances))
    assert sorted(ip for ip in given if ip) == [f"10.0.0.{number}" for number in range(1, 6)]
    with office.database.read() as unit:
        assert len(unit.select(select(ip_lease.c.ip)).all()) == 5


def test_of_two_who_add_the_same_name_at_once_one_is_told_that_it_is_taken(office: Office, site: Site) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: office.ask("networks.add", plan(), site.operator), range(4)))
    assert sorted(answer.status for answer in answers) == [201, 409, 409, 409]
    with office.database.read() as unit:
        assert len(unit.select(select(network.c.id)).all()) == 1
