"""Operations of services: they charge people and teams for what these used of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Writes
from marketplace.http.principal import Credential
from marketplace.keys import service as keys
from marketplace.keys.service import UnknownKeyError
from marketplace.ledger.book import InsufficientFundsError
from marketplace.providers import service as providers
from marketplace.services import service
from marketplace.services.service import Charge, ChargeError, DuplicateRequestError, Seller
from marketplace.services.wire import BulkAnswer, BulkRequest, ChargeAnswer, ChargeRequest, OneCharge
from marketplace.settings import service as settings
from marketplace.store.db import WriteUnit
from marketplace.teams import service as teams
from marketplace.users import service as users
from marketplace.users.permissions import Permission

ON_BEHALF_OF = "X-On-Behalf-Of"
SERVICE: frozenset[Credential] = frozenset({"service_key"})


def charge(call: Call, unit: WriteUnit, request: ChargeRequest) -> ChargeAnswer:
    """Charge for one request."""
    return ChargeAnswer(request_id=_charge(call, unit, request, [request], "")[0])


def bulk_charge(call: Call, unit: WriteUnit, request: BulkRequest) -> BulkAnswer:
    """Charge for several requests of one customer: for all, or for none."""
    return BulkAnswer(request_ids=_charge(call, unit, request, request.charges, "charges.{}."))


def _charge(
    call: Call, unit: WriteUnit, request: ChargeRequest | BulkRequest, charges: Sequence[OneCharge], where: str
) -> list[str]:
    """Make the charges; `where` is the place of the one with an index in the body."""
    seller = _seller(call, unit, request)
    owner_id, account_id = _customer(call, unit)
    try:
        ids = service.charge(
            unit,
            seller,
            account_id,
            [Charge(item.amount, item.request_id, item.usage_metadata) for item in charges],
            share=settings.current(unit).provider_share,
            now=call.now,
            random=call.context.random,
        )
    except DuplicateRequestError as error:
        raise Refusal(
            Code.DUPLICATE_REQUEST_ID,
            "This request was charged before.",
            param=f"{where.format(error.index)}request_id",
            details={"request_id": error.request_id},
        ) from error
    except ChargeError as error:
        raise _refused(error, f"{where.format(error.index)}amount") from error
    call.record(
        unit,
        "services.charge",
        owner_id=owner_id,
        subject_id=ids[0],
        service=seller.service,
        provider=seller.provider,
        charges=len(ids),
    )
    return ids


def _refused(error: ChargeError, param: str) -> Refusal:
    if isinstance(error.__cause__, InsufficientFundsError):
        return Refusal(Code.INSUFFICIENT_FUNDS, "The account does not have as much.", param=param)
    return Refusal(Code.VALIDATION_FAILED, f"{param}: the balance would leave its range", param=param)


def _seller(call: Call, unit: WriteUnit, request: ChargeRequest | BulkRequest) -> Seller:
    """The service and provider that the caller's key is bound to, if the request names them."""
    try:
        key = keys.find_by_id(unit, call.caller.credential_id)
    except UnknownKeyError as error:
        raise Refusal(Code.INVALID_API_KEY, "The API key was revoked.") from error
    found = None if key.provider is None else providers.find(unit, key.provider)
    if key.service is None or request.service != key.service:
        raise Refusal(Code.PERMISSION_DENIED, "The key is not this service's.", param="service")
    if request.provider != (None if found is None else found.name):
        raise Refusal(Code.PERMISSION_DENIED, "The key is not this provider's.", param="provider")
    return Seller(key.service, "" if found is None else found.id, key.id)


def _customer(call: Call, unit: WriteUnit) -> tuple[str, str]:
    """Who is charged, and their account, as the header names them."""
    kind, _, owner_id = call.headers.get(ON_BEHALF_OF.lower(), "").partition(":")
    if kind not in ("user", "team") or not owner_id:
        message = f"{ON_BEHALF_OF}: it says who is charged, as user:<id> or team:<id>"
        raise Refusal(Code.VALIDATION_FAILED, message, param=ON_BEHALF_OF)
    found = users.find(unit, owner_id) if kind == "user" else teams.find(unit, owner_id)
    if found is None:
        code = Code.USER_NOT_FOUND if kind == "user" else Code.TEAM_NOT_FOUND
        raise Refusal(code, f"There is no such {kind}.", param=ON_BEHALF_OF)
    return found.id, found.account_id


_ERRORS = (
    Code.USER_NOT_FOUND,
    Code.TEAM_NOT_FOUND,
    Code.INSUFFICIENT_FUNDS,
    Code.DUPLICATE_REQUEST_ID,
)
_HEADERS = {ON_BEHALF_OF: "Who is charged: `user:<id>` or `team:<id>`."}
_REQUEST_ID = "render-4711"

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="services.charge",
        summary="Charge whom the header X-On-Behalf-Of names for what they used of a service.",
        path="/api/v1/services/charge",
        request=ChargeRequest,
        response=ChargeAnswer,
        permission=Permission.SERVICES_CHARGE,
        credentials=SERVICE,
        rate="charge",
        headers=_HEADERS,
        success=201,
        handler=Writes(charge),
        example={
            "service": "render",
            "provider": "acme",
            "amount": [1354, 1000],
            "request_id": _REQUEST_ID,
            "usage_metadata": '{"frames": 12}',
        },
        answer={"request_id": _REQUEST_ID},
        errors=_ERRORS,
    ),
    Operation(
        name="services.bulk_charge",
        summary="Charge one customer for several requests at once: all of them, or none.",
        path="/api/v1/services/bulk-charge",
        request=BulkRequest,
        response=BulkAnswer,
        permission=Permission.SERVICES_CHARGE,
        credentials=SERVICE,
        rate="charge",
        headers=_HEADERS,
        success=201,
        handler=Writes(bulk_charge),
        example={
            "service": "render",
            "provider": "acme",
            "charges": [{"amount": [1354, 1000], "request_id": _REQUEST_ID}, {"amount": [1, 3]}],
        },
        answer={"request_ids": [_REQUEST_ID, "019a0f6c-2a00-7abc-8def-000000000007"]},
        errors=_ERRORS,
    ),
)
