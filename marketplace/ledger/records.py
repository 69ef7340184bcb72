"""Journal records: what a gateway writes durably about a request before the ledger knows of it, in the order it
happened.

Life of a request: Hold, any number of Extend and Checkpoint, then exactly one Settle or Void. `seq` is given by the
journal, rises strictly within it, and is never used again; a journal's name (the `node` of apply_batch) lives exactly
as long as its file. Times are microseconds UTC, amounts nano-units, counters cumulative.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from marketplace.ledger.rules import Outcome

Source = Literal["engine", "checkpoint", "recovered"]
"""Where final counters come from: the engine at the end, the last checkpoint, or the engine asked again after a
crash."""


class Hold(msgspec.Struct, tag="hold", frozen=True):
    """Money set aside for a slice of the answer, at the price version that the whole request will pay."""

    seq: int
    request_id: str
    account_id: str
    key_id: str
    model: str
    price_id: str
    amount: int
    prompt_tokens: int
    """estimate made at admission"""
    max_completion: int
    """generated tokens that the amount covers"""
    at: int
    deadline: int = 0
    """By when the request must have ended; 0 means HOLD_LIFETIME_US after `at`."""
    client_call_id: str = ""
    """What links several attempts of one client call."""


class Extend(msgspec.Struct, tag="extend", frozen=True):
    """Adds `amount` to the hold of a running request."""

    seq: int
    request_id: str
    amount: int
    at: int


class Checkpoint(msgspec.Struct, tag="checkpoint", frozen=True):
    """Counters so far: what a crash of both processes settles by."""

    seq: int
    request_id: str
    prompt: int
    cached: int
    completion: int
    at: int


class Settle(msgspec.Struct, tag="settle", frozen=True):
    """The end of a request: everything metered, and whether it is charged (rules.judge decided `billable` and
    `reason`)."""

    seq: int
    request_id: str
    prompt: int
    cached: int
    completion: int
    outcome: Outcome
    billable: bool
    reason: str
    source: Source
    engine_epoch: str
    at: int
    delivered: int = 0
    """generated tokens whose text was sent to the client"""
    queue_us: int = 0
    ttft_us: int = 0
    duration_us: int = 0


class Void(msgspec.Struct, tag="void", frozen=True):
    """The end of a request that never ran: the hold is given back and nothing was metered. Reason "expired" marks it
    expired."""

    seq: int
    request_id: str
    reason: str
    at: int


JournalRecord = Hold | Extend | Checkpoint | Settle | Void

HOLD_LIFETIME_US = 24 * 3_600_000_000
"""A request is over after this long: the engine remembers final counters for as long, so nothing later could be
settled."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[JournalRecord] = msgspec.msgpack.Decoder(JournalRecord)


def encode(record: JournalRecord) -> bytes:
    """Return the record as msgpack."""
    return _encoder.encode(record)


def decode(body: bytes) -> JournalRecord:
    """Read a record; msgspec.DecodeError or msgspec.ValidationError when the bytes are not one."""
    return _decoder.decode(body)


def with_seq(record: JournalRecord, seq: int) -> JournalRecord:
    """Return a copy of the record numbered `seq`: the journal numbers records as it writes them."""
    return msgspec.structs.replace(record, seq=seq)
