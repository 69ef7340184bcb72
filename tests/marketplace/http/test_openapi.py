"""The document: valid, complete, and true to what is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from marketplace.http.errors import Code
from marketplace.http.openapi import codes, document
from marketplace.operations import TABLE


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document(TABLE)))
    return made


def test_it_is_valid(described: dict[str, Any]) -> None:
    assert described["openapi"] == "3.1.0"
    assert list(OpenAPIV31SpecValidator(described).iter_errors()) == []


def test_every_operation_is_in_it_with_examples_errors_and_security(described: dict[str, Any]) -> None:
    for operation in TABLE:
        row = described["paths"][operation.path][operation.method.lower()]
        assert row["operationId"] == operation.name
        assert (row["security"] == []) == (operation.permission is None)
        in_path = {item["name"]: item["example"] for item in row["parameters"] if item["in"] == "path"}
        assert operation.path.format(**in_path) == operation.path.format(**operation.example)
        if operation.opaque:
            assert row["requestBody"]["content"]["application/json"]["schema"]["type"] == "object"
        elif operation.method != "GET":
            sent = row["requestBody"]["content"]["application/json"]
            assert {**sent["examples"]["bare"]["value"], **in_path} == dict(operation.example)
            bare = described["components"]["schemas"][sent["schema"]["anyOf"][0]["$ref"].rpartition("/")[2]]
            assert in_path.keys().isdisjoint(bare["properties"])
        told = {name for response in row["responses"].values() for name in _examples(response)}
        assert told - {"bare", "envelope"} == {code.value for code in codes(operation)}
        assert all(str(code.status) in row["responses"] for code in codes(operation))
    assert sum(len(methods) for methods in described["paths"].values()) == len(TABLE)


def test_names_on_the_wire_are_the_contract_s(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    assert {"from", "to"} <= schemas["ListRequestV2"]["properties"].keys()
    assert {"from", "to", "prompt_tokens"} <= schemas["ServiceUsage"]["properties"].keys()
    assert schemas["LoginRequest"]["required"] == ["email", "password"]
    assert schemas["LoginRequest"]["additionalProperties"] is False
    assert schemas["InfoAnswer"]["properties"]["balance"]["type"] == "number"


def test_every_code_has_one_status_and_a_pascal_case_name() -> None:
    for code in Code:
        assert 400 <= code.status < 600 and code.type.endswith("_error")
        assert code.value.isalnum() and code.value[0].isupper()


def _examples(response: dict[str, Any]) -> list[str]:
    return [name for media in response.get("content", {}).values() for name in media["examples"]]
