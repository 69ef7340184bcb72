"""The two forms of a message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.http.envelope import pack, unpack

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["version", "data", "a"]), inner),
    max_leaves=8,
)


@given(json_values)
def test_exactly_version_and_data_is_an_envelope(value: Any) -> None:
    parcel = unpack(json.dumps(value).encode(), None)
    assert parcel.enveloped == (isinstance(value, dict) and set(value) in ({"version", "data"}, {"data"}))
    assert parcel.data == (value["data"] if parcel.enveloped else value)


@given(json_values, st.booleans())
def test_what_is_packed_is_unpacked(value: Any, enveloped: bool) -> None:
    parcel = unpack(pack({"a": value}, "v060", enveloped=enveloped), None)
    assert (parcel.data, parcel.enveloped, parcel.version) == ({"a": value}, enveloped, "v060" if enveloped else None)


def test_an_empty_body_is_an_empty_object() -> None:
    assert unpack(b"", "v060").data == unpack(b" \n", None).data == {}


def test_the_answer_has_the_form_of_its_request(office: Office) -> None:
    ada = office.person()
    bare = office.ask("auth.me", {}, ada, X_Protocol_Version="v055")
    assert bare.body["id"] == ada.id and bare.headers["X-Protocol-Version"] == "v055"
    wrapped = office.ask("auth.me", {"version": "v055", "data": {}}, ada)
    assert wrapped.body.keys() == {"version", "data"} and wrapped.body["version"] == "v055"
    assert wrapped.body["data"] == bare.body and wrapped.headers["X-Protocol-Version"] == "v055"
    newest = office.ask("auth.me", {"data": {}}, ada)
    assert newest.body["version"] == "v062"
    by_date = office.ask("auth.me", {"version": "2026-04-02", "data": {}}, ada)
    assert by_date.body["version"] == "v057"


def test_an_error_has_the_form_of_its_request_too(office: Office) -> None:
    ada = office.person()
    wrong = office.ask("auth.me", {"version": "v055", "data": {"x": 1}}, ada)
    assert wrong.status == 400 and wrong.body.keys() == {"version", "error"} and wrong.body["version"] == "v055"
    bare = office.ask("auth.me", {"x": 1}, ada)
    assert bare.body.keys() == {"error"}
    assert bare.body["error"].keys() == {"message", "type", "param", "code", "details", "request_id"}
    assert bare.headers["X-Request-Id"] == bare.body["error"]["request_id"]


@pytest.mark.parametrize("version", [62, True, ["v062"], {"v": 1}])
def test_a_version_is_text(office: Office, version: Any) -> None:
    answer = office.ask("auth.me", {"version": version, "data": {}}, office.person())
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "version")


def test_two_versions_that_differ_are_refused(office: Office) -> None:
    ada = office.person()
    same = office.ask("auth.me", {"version": "v060", "data": {}}, ada, X_Protocol_Version="v060")
    assert same.status == 200
    answer = office.ask("auth.me", {"version": "v060", "data": {}}, ada, X_Protocol_Version="v061")
    assert (answer.status, answer.code) == (400, "BadRequest")
