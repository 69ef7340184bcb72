"""The OpenAPI 3.1 document, generated from the table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic.json_schema import models_json_schema

from marketplace.http import idempotency
from marketplace.http.envelope import VERSION_HEADER
from marketplace.http.errors import Code
from marketplace.http.operation import Exports, Operation

_TEMPLATE = "#/components/schemas/{model}"
_EVERYWHERE = (
    Code.BAD_REQUEST,
    Code.VALIDATION_FAILED,
    Code.UNSUPPORTED_VERSION,
    Code.BODY_TOO_LARGE,
    Code.REQUEST_TIMEOUT,
    Code.RATE_LIMITED,
    Code.INTERNAL_ERROR,
    Code.SERVICE_UNAVAILABLE,
)
_WITH_CALLER = (
    Code.AMBIGUOUS_CREDENTIALS,
    Code.NOT_AUTHENTICATED,
    Code.INVALID_TOKEN,
    Code.EXPIRED_TOKEN,
    Code.INVALID_API_KEY,
    Code.PERMISSION_DENIED,
    Code.CREDENTIALS_NOT_PERMITTED,
)
_SECURITY_SCHEMES = {
    "session": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "A session token of auth/login, or an API key.",
    },
    "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "A person's or a team's key."},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "version": {"type": "string", "description": "only in the envelope form"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field that is to blame"},
                "code": {"type": "string", "enum": [code.value for code in Code]},
                "details": {"type": "object"},
                "request_id": {"type": "string"},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
_OPAQUE = {"application/json": {"schema": {"type": "object", "description": "as its sender defines it"}}}
_DESCRIPTION = (
    "The management API of Headrace. Bodies are JSON in two forms, and an answer has the form of its request: bare, "
    f"with the protocol version in the header `{VERSION_HEADER}`, or in an envelope "
    '`{"version": "v062", "data": {…}}`. Without a version the newest that an operation serves is used. '
    "Money is in cents of the server currency, times are RFC 3339 in UTC."
)


def document(table: Sequence[Operation[Any]]) -> dict[str, Any]:
    """Make the whole document."""
    models = [(operation.request, "validation") for operation in table]
    models += [(operation.response, "serialization") for operation in table if operation.response is not None]
    refs, schemas = models_json_schema(
        [(model, mode) for model, mode in dict.fromkeys(models)],  # type: ignore[misc]
        by_alias=True,
        ref_template=_TEMPLATE,
    )
    definitions = schemas.get("$defs", {})
    in_path = _take_path_fields(table, refs, definitions)
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in table:
        paths[operation.path][operation.method.lower()] = _operation(operation, refs, in_path[operation.name])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace management API", "version": _release(), "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": noun} for noun in sorted({_noun(operation) for operation in table})],
        "paths": dict(paths),
        "components": {
            "schemas": {**definitions, "Error": _ERROR},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def codes(operation: Operation[Any]) -> tuple[Code, ...]:
    """Every code that an operation may answer with."""
    found = (*_EVERYWHERE, *operation.errors)
    if operation.permission is not None:
        found += _WITH_CALLER
    if operation.idempotent:
        found += (Code.IDEMPOTENCY_KEY_REUSED,)
    return tuple(dict.fromkeys(found))


def _take_path_fields(
    table: Sequence[Operation[Any]], refs: Any, definitions: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Take what a path says out of the bodies, and return it by operation: the schema of each part of the path."""
    taken: dict[str, dict[str, Any]] = {}
    of_model: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in table:
        model = refs[(operation.request, "validation")]["$ref"].rpartition("/")[2]
        for name in _path_names(operation):
            schema = definitions[model]
            if name in schema["properties"]:
                of_model[model][name] = schema["properties"].pop(name)
                schema["required"] = [field for field in schema["required"] if field != name]
        taken[operation.name] = {name: of_model[model][name] for name in _path_names(operation)}
    return taken


def _path_names(operation: Operation[Any]) -> list[str]:
    return re.findall(r"\{(\w+)\}", operation.path)


def _operation(operation: Operation[Any], refs: Any, in_path: dict[str, Any]) -> dict[str, Any]:
    lines = [f"Versions: {operation.versions[0]} to {operation.versions[-1]}."]
    if operation.permission is not None:
        lines.append(f"Permission: `{operation.permission}`. Credentials: {', '.join(sorted(operation.credentials))}.")
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": " ".join(lines),
        "tags": [_noun(operation)],
        "parameters": _parameters(operation, in_path),
        "responses": {str(operation.success): _success(operation, refs), **_errors(operation)},
        "security": [] if operation.permission is None else [{"session": []}, {"api_key": []}],
    }
    if operation.opaque:
        described["requestBody"] = {"required": True, "content": _OPAQUE}
    elif operation.method != "GET":
        missing = set(operation.request.model_json_schema().get("required", ())) - in_path.keys()
        sent = {name: value for name, value in operation.example.items() if name not in in_path}
        described["requestBody"] = {
            "required": bool(missing),
            "content": _content(refs[(operation.request, "validation")], operation, sent),
        }
    return described


def _parameters(operation: Operation[Any], in_path: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": schema, "example": operation.example[name]}
        for name, schema in in_path.items()
    ]
    found.append(
        {
            "name": VERSION_HEADER,
            "in": "header",
            "required": False,
            "description": "Protocol version of a bare body.",
            "schema": {"type": "string"},
            "example": operation.versions[-1],
        }
    )
    for name, description in operation.headers.items():
        described = {"description": description, "schema": {"type": "string"}}
        found.append({"name": name, "in": "header", "required": True, **described})
    if operation.idempotent:
        found.append(
            {
                "name": idempotency.HEADER,
                "in": "header",
                "required": False,
                "description": "The same key with the same request is done once and answered the same for 24 hours.",
                "schema": {"type": "string", "minLength": 1, "maxLength": idempotency.MAX_KEY},
            }
        )
    return found


def _success(operation: Operation[Any], refs: Any) -> dict[str, Any]:
    if isinstance(operation.handler, Exports):
        sheet = {"schema": {"type": "string"}, "examples": {"bare": {"value": "id,created_at\r\n"}}}
        return {"description": "CSV, with a line of names at its head.", "content": {"text/csv": sheet}}
    if operation.response is None:
        return {"description": "Done."}
    content = _content(refs[(operation.response, "serialization")], operation, operation.answer)
    return {"description": "Done.", "content": content}


def _content(ref: dict[str, Any], operation: Operation[Any], example: Any) -> dict[str, Any]:
    envelope = {
        "type": "object",
        "required": ["data"],
        "properties": {"version": {"type": "string"}, "data": ref},
        "additionalProperties": False,
    }
    return {
        "application/json": {
            "schema": {"anyOf": [ref, envelope]},
            "examples": {
                "bare": {"value": example},
                "envelope": {"value": {"version": operation.versions[-1], "data": example}},
            },
        }
    }


def _errors(operation: Operation[Any]) -> dict[str, Any]:
    by_status: dict[int, list[Code]] = defaultdict(list)
    for code in codes(operation):
        by_status[code.status].append(code)
    return {
        str(status): {
            "description": ", ".join(code.value for code in found),
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/Error"},
                    "examples": {code.value: {"value": _example(code)} for code in found},
                }
            },
        }
        for status, found in sorted(by_status.items())
    }


def _example(code: Code) -> dict[str, Any]:
    return {
        "error": {
            "message": "What went wrong, for people.",
            "type": code.type,
            "param": None,
            "code": code.value,
            "request_id": "019a0f6c-2a00-7abc-8def-000000000005",
        }
    }


def _noun(operation: Operation[Any]) -> str:
    return operation.name.partition(".")[0]


def _release() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0"
