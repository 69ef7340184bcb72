"""Requests and answers of services."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator, StringConstraints, WithJsonSchema

from marketplace.http.wire import Wire
from marketplace.ledger.money import MoneyError
from marketplace.services.rules import MAX_TERM, Fraction, cost

MAX_CHARGES = 100


def _amount(value: object) -> Fraction:
    """Read [numerator, denominator]. ValueError."""
    if not isinstance(value, list) or len(value) != 2 or any(type(term) is not int for term in value):
        raise ValueError("an amount is [numerator, denominator], two integers")
    amount = Fraction(*value)
    try:
        cost(amount, 0)
    except MoneyError as error:
        raise ValueError(str(error)) from error
    return amount


Amount = Annotated[
    Fraction,
    PlainValidator(_amount),
    WithJsonSchema(
        {
            "type": "array",
            "prefixItems": [
                {"type": "integer", "minimum": 0, "maximum": MAX_TERM},
                {"type": "integer", "minimum": 1, "maximum": MAX_TERM},
            ],
            "minItems": 2,
            "maxItems": 2,
            "description": "numerator and denominator of an amount in cents; rounded once, half up, to 1e-7 cents",
        }
    ),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=63)]
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Metadata = Annotated[str, StringConstraints(max_length=8192)]


class OneCharge(Wire):
    """What to charge for. A request id is charged once; without one, the charge gets its own."""

    amount: Amount
    request_id: RequestId | None = None
    usage_metadata: Metadata | None = None
    """kept, and shown to the customer"""


class ChargeRequest(OneCharge):
    """A charge of a provider's service. Both are those of the service's key."""

    service: Name
    provider: Name | None = None


class ChargeAnswer(Wire):
    """The request that was charged."""

    request_id: str


class BulkRequest(Wire):
    """Charges for one customer: all are made, or none."""

    service: Name
    provider: Name | None = None
    charges: Annotated[list[OneCharge], Field(min_length=1, max_length=MAX_CHARGES)]


class BulkAnswer(Wire):
    """The requests that were charged, in the order of the charges."""

    request_ids: list[str]
