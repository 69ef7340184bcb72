"""Operations on accounts: what they have, what happened on them, and what admins may change."""

from __future__ import annotations

from typing import Any

from marketplace.accounts import service as accounts
from marketplace.accounts import statement
from marketplace.accounts.statement import Line
from marketplace.accounts.wire import (
    ByTeam,
    ByUserIds,
    ChargedUsage,
    ChargedUsageInfo,
    CreditAnswer,
    CreditRequest,
    Described,
    ExternalAnswer,
    ExternalInfo,
    ExternalRequest,
    Info,
    InfoAnswer,
    InfoRequest,
    InfoTool,
    ListAnswer,
    ListRequestV1,
    ListRequestV2,
    ListTool,
    PromoInfo,
    RefundInfo,
    ReservationInfo,
    ServiceUsage,
    ServiceUsageInfo,
    StripeInfo,
    StripePayment,
    StripePaymentEvent,
    StripeRefund,
    StripeRefundEvent,
    Targets,
    TransactionAnswer,
    Usage,
    UsageInfo,
    Whose,
)
from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Tool, Writes
from marketplace.http.pagination import read_cursor, write_cursor
from marketplace.http.wire import Json, write_instant
from marketplace.ledger import rentals
from marketplace.ledger.book import InsufficientFundsError, LedgerError
from marketplace.ledger.ledger import CreditInUseError
from marketplace.ledger.rentals import Charged as Rented
from marketplace.payments import service as payments
from marketplace.payments.service import Moved
from marketplace.services import service as services
from marketplace.services.service import Charged
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import service as teams
from marketplace.users import service as users
from marketplace.users.permissions import Permission

WINDOW_US = 30 * 86_400_000_000
"""What the second version lists when it is not told since when."""
_USER = "019a0f6c-2a00-7abc-8def-000000000001"


def info(call: Call, unit: ReadUnit, request: InfoRequest) -> InfoAnswer:
    """Return what an account has."""
    account_id = _account(call, unit, request.selector)
    state = accounts.get(unit, account_id)
    return InfoAnswer(
        balance=state.posted,
        pending=payments.pending(unit, account_id),
        held=state.held,
        current_cost_per_hour=rentals.rate_of(unit, account_id, call.now),
        credit_limit=state.credit_limit,
        unlimited=state.unlimited,
    )


def list_v1(call: Call, unit: ReadUnit, request: ListRequestV1) -> ListAnswer:
    """Return a page of everything that happened on an account."""
    return _page(call, unit, request, None, None)


def list_v2(call: Call, unit: ReadUnit, request: ListRequestV2) -> ListAnswer:
    """Return a page of what happened on an account within a time range."""
    until = request.until
    since = request.since
    if since is None:
        since = (call.now if until is None else until) - WINDOW_US
    if until is not None and until < since:
        raise Refusal(Code.VALIDATION_FAILED, "to: it lies before from", param="to")
    return _page(call, unit, request, since, until)


def add_external(call: Call, unit: WriteUnit, request: ExternalRequest) -> ExternalAnswer:
    """Add or remove funds: for all of the accounts, or for none."""
    made = []
    for owner_id, account_id in _targets(unit, request.account, "account"):
        try:
            posted = accounts.adjust(
                unit,
                account_id,
                request.amount,
                key=f"{call.request_id}:{account_id}",
                now=call.now,
                random=call.context.random,
                memo=request.description,
            )
        except InsufficientFundsError as error:
            raise Refusal(
                Code.INSUFFICIENT_FUNDS, f"The account of {owner_id} does not have as much.", param="amount"
            ) from error
        except LedgerError as error:
            raise Refusal(
                Code.VALIDATION_FAILED, "amount: the balance would leave its range", param="amount"
            ) from error
        call.record(unit, "account.external", owner_id=owner_id, subject_id=posted.tx_id, nano=request.amount)
        made.append(posted.tx_id)
    return ExternalAnswer(transaction_ids=made)


def update_credit(call: Call, unit: WriteUnit, request: CreditRequest) -> CreditAnswer:
    """Set how far accounts may go below zero: all of them, or none."""
    updated = []
    for owner_id, account_id in _targets(unit, request.selector, "selector"):
        try:
            accounts.set_credit(unit, account_id, credit_limit=request.credit_limit, unlimited=request.unlimited)
        except CreditInUseError as error:
            raise Refusal(
                Code.CREDIT_IN_USE, f"The account of {owner_id} already stands lower than that.", param="credit_limit"
            ) from error
        call.record(
            unit,
            "account.credit",
            owner_id=owner_id,
            subject_id=account_id,
            nano=request.credit_limit,
            unlimited=request.unlimited,
        )
        updated.append(owner_id)
    return CreditAnswer(updated_ids=updated)


def of_team(arguments: Json) -> Json:
    """A request about the account that a tool's arguments mean."""
    rest = {name: value for name, value in arguments.items() if name != "team_id"}
    team_id = arguments.get("team_id")
    return {**rest, "selector": "ByToken" if team_id is None else {"ByTeam": team_id}}


def _account(call: Call, unit: ReadUnit, whose: Whose) -> str:
    """The account that the caller asks about, if it may. Admins see those of teams that were deleted, too."""
    if not isinstance(whose, ByTeam):
        return call.caller.account_id
    if Permission.ACCOUNT_READ_ALL not in call.caller.permissions:
        return party(call, unit, whose.team_id, param="selector.ByTeam").account_id
    found = accounts.of_owner(unit, "team", whose.team_id)
    if found is None:
        raise Refusal(Code.TEAM_NOT_FOUND, "There is no such team.", param="selector.ByTeam")
    return found


def _targets(unit: WriteUnit, targets: Targets, param: str) -> list[tuple[str, str]]:
    """Owners and their accounts, each once, in the order given; the accounts are locked."""
    found = []
    people = isinstance(targets, ByUserIds)
    ids = targets.user_ids if isinstance(targets, ByUserIds) else targets.team_ids
    kind, code = ("user", Code.USER_NOT_FOUND) if people else ("team", Code.TEAM_NOT_FOUND)
    for owner_id in dict.fromkeys(ids):
        account_id = accounts.of_owner(unit, kind, owner_id)
        if account_id is None or (people and not users.stays(unit, owner_id)):
            raise Refusal(code, f"There is no {kind} {owner_id}.", param=param)
        found.append((owner_id, account_id))
    accounts.lock(unit, [account_id for _, account_id in found])
    # Under the lock, so that no team is deleted between the look and the change.
    if not people and any(teams.find(unit, team_id) is None for team_id, _ in found):
        raise Refusal(code, "One of the teams was deleted.", param=param)
    return found


def _page(call: Call, unit: ReadUnit, request: ListRequestV1, since: int | None, until: int | None) -> ListAnswer:
    lines, position = statement.page(
        unit,
        _account(call, unit, request.selector),
        since=since,
        until=until,
        position=read_cursor(request.cursor, int),
        limit=request.limit,
    )
    charges = [line.tx_id for line in lines if line.kind == services.KIND]
    charged = services.described(unit, charges) if charges else {}
    movements = [line.tx_id for line in lines if line.kind in payments.KINDS]
    moved = payments.described(unit, movements) if movements else {}
    metered = [line.tx_id for line in lines if line.kind == rentals.KIND]
    rented = rentals.described(unit, metered) if metered else {}
    return ListAnswer(
        transactions=[
            _transaction(line, charged.get(line.tx_id), moved.get(line.tx_id), rented.get(line.tx_id)) for line in lines
        ],
        next_cursor=None if position is None else write_cursor(position),
    )


def _transaction(line: Line, charged: Charged | None, moved: Moved | None, rented: Rented | None) -> TransactionAnswer:
    return TransactionAnswer(
        id=line.tx_id,
        amount=line.amount,
        created_at=line.at,
        resource_type=None if rented is None else rented.resource_type,
        resource_name=None if rented is None else rented.resource_name,
        info=_info(line, charged, moved) if rented is None else _usage(rented),
    )


def _info(line: Line, charged: Charged | None, moved: Moved | None) -> Info:
    if charged is not None:
        return ChargedUsageInfo(
            usage=ChargedUsage(
                service=charged.service,
                provider=charged.provider,
                request_id=charged.request_id,
                usage_metadata=charged.usage_metadata,
            )
        )
    if moved is not None and moved.provider == "stripe":
        return StripeInfo(stripe=_at_stripe(moved))
    usage = line.usage
    if usage is not None:
        return ServiceUsageInfo(
            usage=ServiceUsage(
                model=usage.model,
                key_name=usage.key_name,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                requests=usage.requests,
                begin=usage.begin,
                end=usage.end,
            )
        )
    if line.kind == "reservation":
        return ReservationInfo(reservation=Described(description=line.memo))
    if line.kind == "refund":
        return RefundInfo(refund=Described(description=line.memo))
    if line.kind == "bonus":
        return PromoInfo(promo=Described(description=line.memo))
    return ExternalInfo(external=Described(description=line.memo))


def _usage(rented: Rented) -> UsageInfo:
    return UsageInfo(
        usage=Usage(
            resource_type=rented.resource_type,
            resource_id=rented.resource_id,
            resource_name=rented.resource_name,
            carryover=rented.carryover,
            rounding=rented.rounding,
            begin=rented.begin,
            end=rented.end,
        )
    )


def _at_stripe(moved: Moved) -> StripePaymentEvent | StripeRefundEvent:
    if moved.refund_id is None:
        return StripePaymentEvent(payment=StripePayment(payment_intent_id=moved.payment_id))
    return StripeRefundEvent(
        refund=StripeRefund(payment_intent_id=moved.payment_id, refund_id=moved.refund_id, undone=moved.undone)
    )


_TRANSACTION = {
    "id": "019a0f6c-2a00-7abc-8def-000000000006",
    "amount": -0.0417,
    "created_at": write_instant(1_795_222_800_000_000),
    "resource_type": None,
    "resource_name": None,
    "info": {
        "ServiceUsage": {
            "service": "inference",
            "model": "smollm2-135m",
            "key_name": "laptop",
            "prompt_tokens": 120,
            "cached_tokens": 64,
            "completion_tokens": 5,
            "requests": 2,
            "from": "2026-11-21T00:59:58Z",
            "to": "2026-11-21T01:00:00Z",
        }
    },
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="account.info",
        summary="Balance, credit limit and what is held.",
        path="/api/v1/account/info",
        request=InfoRequest,
        response=InfoAnswer,
        permission=Permission.ACCOUNT_READ,
        rate="read",
        handler=Reads(info),
        example={"selector": "ByToken"},
        answer={
            "balance": 1000,
            "pending": 0,
            "held": 0,
            "current_cost_per_hour": 0,
            "credit_limit": 0,
            "unlimited": False,
        },
        errors=(Code.NOT_TEAM_MEMBER, Code.TEAM_NOT_FOUND),
        tool=Tool(
            name="get_account_info",
            description="Balance, credit limit and what is held or spent per hour, of your account or of a team's.",
            arguments=InfoTool,
            body=of_team,
        ),
    ),
    Operation(
        name="account.transactions_list",
        summary="Every transaction of the account, newest first.",
        path="/api/v1/account/transactions/list",
        request=ListRequestV1,
        response=ListAnswer,
        permission=Permission.ACCOUNT_READ,
        rate="read",
        handler=Reads(list_v1),
        example={"selector": "ByToken"},
        answer={"transactions": [_TRANSACTION], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER, Code.TEAM_NOT_FOUND),
    ),
    Operation(
        name="account.transactions_list_v2",
        summary="Transactions of a time range, newest first; the last 30 days by default.",
        path="/api/v2/account/transactions/list",
        request=ListRequestV2,
        response=ListAnswer,
        permission=Permission.ACCOUNT_READ,
        rate="read",
        handler=Reads(list_v2),
        example={"selector": "ByToken", "from": "2026-11-01T00:00:00Z", "to": "2026-11-21T00:00:00Z", "limit": 100},
        answer={"transactions": [_TRANSACTION], "next_cursor": None},
        errors=(Code.NOT_TEAM_MEMBER, Code.TEAM_NOT_FOUND),
        tool=Tool(
            name="list_transactions",
            description="What was paid in, used, refunded and charged within a time range, newest first.",
            arguments=ListTool,
            body=of_team,
        ),
    ),
    Operation(
        name="account.transactions_create_external",
        summary="Add funds to accounts, or remove them, by hand.",
        path="/api/v1/account/transactions/create/external",
        request=ExternalRequest,
        response=ExternalAnswer,
        permission=Permission.ACCOUNT_ADJUST,
        rate="write",
        idempotent=True,
        handler=Writes(add_external),
        example={"account": {"ByUserIds": [_USER]}, "amount": 2000, "description": "bank transfer 4711"},
        answer={"transaction_ids": ["019a0f6c-2a00-7abc-8def-000000000006"]},
        errors=(Code.USER_NOT_FOUND, Code.TEAM_NOT_FOUND, Code.INSUFFICIENT_FUNDS),
    ),
    Operation(
        name="account.update_credit_limit",
        summary="Set how far below zero accounts may go, or let them spend without limit.",
        path="/api/v1/account/update_credit_limit",
        request=CreditRequest,
        response=CreditAnswer,
        permission=Permission.ACCOUNT_ADJUST,
        rate="write",
        handler=Writes(update_credit),
        example={"selector": {"ByUserIds": [_USER]}, "credit_limit": 10000, "unlimited": False},
        answer={"updated_ids": [_USER]},
        errors=(Code.USER_NOT_FOUND, Code.TEAM_NOT_FOUND, Code.CREDIT_IN_USE),
    ),
)
