"""Transactions as CSV: what the list shows of a time range, line by line, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from marketplace.accounts.operations import list_v2
from marketplace.accounts.wire import ListRequestV2, TransactionAnswer, Whose
from marketplace.http import sheets
from marketplace.http.errors import Code
from marketplace.http.operation import Call, Exports, Operation
from marketplace.http.sheets import Plain
from marketplace.http.wire import InstantIn, Wire, write_instant
from marketplace.ledger.money import format_nano
from marketplace.users.permissions import Permission

PAGE = 500
"""Transactions in memory at a time."""
_TOLD = (
    "description",
    "service",
    "model",
    "key_name",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "requests",
)
"""Members of `info` that have a column; a transaction leaves those empty that it does not have."""
_COLUMNS = ("id", "created_at", "amount_cents", "kind", "resource_type", "resource_name", *_TOLD)
_CENTS_IN_UNIT = 100


class ExportRequest(Wire):
    """Transactions of a time range: from (inclusive) to (exclusive); by default the last 30 days."""

    selector: Whose = "ByToken"
    since: InstantIn | None = Field(default=None, alias="from")
    until: InstantIn | None = Field(default=None, alias="to")


def export(call: Call, request: ExportRequest) -> Iterator[str]:
    """Give the lines, newest first, a page at a time; each page is a look of its own at the ledger."""
    text, cursor = sheets.line(_COLUMNS), None
    until = call.now + 1 if request.until is None else request.until
    while True:
        asked = ListRequestV2.model_validate(
            {"selector": request.selector, "limit": PAGE, "cursor": cursor}, by_alias=True
        ).model_copy(update={"since": request.since, "until": until})
        with call.context.database.read() as unit:
            page = list_v2(call, unit, asked)
        yield text + "".join(sheets.line(_cells(line)) for line in page.transactions)
        text, cursor = "", page.next_cursor
        if cursor is None:
            return


def _cells(line: TransactionAnswer) -> tuple[sheets.Cell, ...]:
    """One transaction; the kind is the name of its `info`."""
    ((kind, detail),) = line.info.model_dump(by_alias=True).items()
    return (
        Plain(line.id),
        Plain(write_instant(line.created_at)),
        Plain(format_nano(line.amount * _CENTS_IN_UNIT)),
        Plain(kind),
        line.resource_type,
        line.resource_name,
        *(detail.get(name) for name in _TOLD),
    )


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="account.transactions_export",
        summary="Transactions of a time range as CSV, newest first; the last 30 days by default.",
        path="/api/v1/account/transactions/export",
        request=ExportRequest,
        response=None,
        permission=Permission.ACCOUNT_READ,
        rate="write",
        handler=Exports(export, "transactions.csv"),
        example={"selector": "ByToken", "from": "2026-11-01T00:00:00Z", "to": "2026-11-21T00:00:00Z"},
        answer=None,
        errors=(Code.NOT_TEAM_MEMBER, Code.TEAM_NOT_FOUND),
    ),
)
