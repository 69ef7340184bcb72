"""After a crash: every hold that an earlier process left open is ended, before the gateway takes requests.

The tail of the journal is in the ledger by now, so the ledger's open holds of this journal are exactly the requests
that were cut off. For each, the engine is asked what it counted:

| the engine says                            | the hold ends as                                                        |
|--------------------------------------------|-------------------------------------------------------------------------|
| known and ended                            | settled with its counters, server_fault: metered, not charged           |
| known and running                          | aborted first, then the same                                            |
| unknown, by the same engine process        | void: it was never dispatched (the last checkpoint, if there is one)    |
| unknown, by a new engine process, no answer | settled with the last checkpoint's counters, server_fault: not charged |

Nothing is charged in any case: the client saw no [DONE], and that was our fault. What was charged before the crash is
durable and is not touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from engine.wire import Counters, Usage, UsageReply
from gateway.metering import failpoints
from gateway.metering.cover import metered
from gateway.metering.journal import Journal
from gateway.metering.purse import Purses
from gateway.metering.settle import Settler
from marketplace.ledger.holds import OpenHold
from marketplace.ledger.money import MoneyError, Tokens, check_tokens
from marketplace.ledger.records import JournalRecord, Settle, Void
from marketplace.ledger.rules import judge

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
STOP_POLL_S = 0.05
CHUNK = 200
MAX_CHOICES = 128
"""Most choices (`n`) of one request; each is a sequence of its own in the engine, named request_id#index."""


class Engines(Protocol):
    """How the engines are asked about requests of an earlier gateway process."""

    async def usage(self, model: str, request_ids: Sequence[str]) -> UsageReply | None:
        """Counters of the sequences that the model's engine remembers; None when no engine can be asked."""

    async def abort(self, model: str, request_id: str) -> None:
        """Tell the model's engine to end a sequence; its counters are read with `usage` afterwards."""


class RecoveryReport(msgspec.Struct, frozen=True):
    """What recovery did, for the log and the metrics page."""

    replayed: int = 0
    """journal records that the ledger did not have"""
    settled: int = 0
    voided: int = 0
    unbilled_tokens: int = 0
    """tokens metered and not charged; what an engine lost with its process is not among them"""


def sequence_ids(request_id: str, choices: int) -> list[str]:
    """Names that the engine may know a request by: its own, and its choices'."""
    return [request_id, *(f"{request_id}#{index}" for index in range(choices))]


def combine(request_id: str, known: dict[str, Usage]) -> Usage | None:
    """One request's usage over its choices, the prompt counted once; None when no sequence of it is known.

    It has ended only when every known sequence has.
    """
    parts = [usage for name in sequence_ids(request_id, MAX_CHOICES) if (usage := known.get(name)) is not None]
    if not parts:
        return None
    counters = Counters(
        prompt=max(part.counters.prompt for part in parts),
        cached=min(part.counters.cached for part in parts),
        completion=sum(part.counters.completion for part in parts),
        started=any(part.counters.started for part in parts),
    )
    running = any(part.finish_reason is None for part in parts)
    return Usage(counters, None if running else parts[0].finish_reason)


def verdict(hold: OpenHold, usage: Usage | None, epoch: str | None, *, same_process: bool, now: int) -> Settle | Void:
    """How one open hold ends; the record still lacks its number. `epoch` is the engine's that answered, None for no
    answer; `same_process` says that it is the one that served before the crash.
    """
    if usage is not None:
        tokens, source = metered(usage.counters), "recovered"
    else:
        tokens, source = hold.counters, "checkpoint"
        if same_process and tokens == Tokens():
            return Void(0, hold.request_id, "never_dispatched", now)
    try:
        check_tokens(tokens)
    except MoneyError:
        log.error("request %s: impossible counters %s, nothing is metered", hold.request_id, tokens)
        tokens, source = Tokens(), "checkpoint"
    judged = judge("server_fault", tokens)
    return Settle(
        seq=0,
        request_id=hold.request_id,
        prompt=tokens.prompt,
        cached=tokens.cached,
        completion=tokens.completion,
        outcome="server_fault",
        billable=judged.billable,
        reason=judged.reason,
        source="recovered" if source == "recovered" else "checkpoint",
        engine_epoch=epoch or "" if usage is not None else "",
        at=max(now, hold.opened_at),
    )


async def end_open_holds(
    holds: Sequence[OpenHold],
    engines: Engines,
    earlier_epochs: Mapping[str, str],
    journal: Journal,
    purses: Purses,
    settler: Settler,
    clock: Callable[[], int],
) -> RecoveryReport:
    """End every hold, durably and in the ledger. Raises JournalUnavailableError.

    `earlier_epochs` names the engine process that served each model before the crash.

    A crash in the middle is harmless: what was written is applied at the next start, the rest is asked for again.
    """
    settled = voided = unbilled = 0
    for begin in range(0, len(holds), CHUNK):
        chunk = holds[begin : begin + CHUNK]
        records = await _verdicts(chunk, engines, earlier_epochs, clock)
        failpoints.hit("recovery.before_append")
        written: list[Awaitable[None]] = []
        for hold, record in zip(chunk, records, strict=True):
            seq = journal.next_seq
            written.append(journal.append(msgspec.structs.replace(record, seq=seq)))
            purse = purses.get(hold.account_id)
            if purse is not None:
                purse.end_hold(seq, hold.amount, 0)
            if isinstance(record, Settle):
                settled += 1
                unbilled += record.prompt + record.completion
            else:
                voided += 1
        await asyncio.gather(*written)
        failpoints.hit("recovery.after_append")
        await settler.reached(journal.next_seq - 1)
    return RecoveryReport(settled=settled, voided=voided, unbilled_tokens=unbilled)


async def _verdicts(
    holds: Sequence[OpenHold], engines: Engines, earlier_epochs: Mapping[str, str], clock: Callable[[], int]
) -> list[JournalRecord]:
    by_model: dict[str, list[OpenHold]] = {}
    for hold in holds:
        by_model.setdefault(hold.model, []).append(hold)
    found: dict[str, tuple[Usage | None, str | None]] = {}
    for model, some in by_model.items():
        found.update(await _look_up(model, [hold.request_id for hold in some], engines))
    records: list[JournalRecord] = []
    for hold in holds:
        usage, epoch = found[hold.request_id]
        same = epoch is not None and epoch == earlier_epochs.get(hold.model)
        records.append(verdict(hold, usage, epoch, same_process=same, now=clock()))
    return records


async def _look_up(
    model: str, request_ids: Sequence[str], engines: Engines
) -> dict[str, tuple[Usage | None, str | None]]:
    """Ask the model's engine about the requests; what still runs is stopped first."""
    known: dict[str, Usage] = {}
    epoch = await _ask(model, [name for rid in request_ids for name in sequence_ids(rid, 2)], engines, known)
    many = [rid for rid in request_ids if f"{rid}#1" in known]
    if many:
        await _ask(model, [name for rid in many for name in sequence_ids(rid, MAX_CHOICES)], engines, known)
    running = [name for name, usage in known.items() if usage.finish_reason is None]
    for name in running:
        await engines.abort(model, name)
    waited = 0.0
    while running and waited < STOP_TIMEOUT_S:
        await asyncio.sleep(STOP_POLL_S)
        waited += STOP_POLL_S
        if await _ask(model, running, engines, known) is None:
            break
        running = [name for name in running if known[name].finish_reason is None]
    return {rid: (combine(rid, known), epoch) for rid in request_ids}


async def _ask(model: str, names: Sequence[str], engines: Engines, known: dict[str, Usage]) -> str | None:
    """Add what the engine knows of the sequences to `known`; returns its epoch, None when it did not answer."""
    try:
        reply = await asyncio.wait_for(engines.usage(model, names), ASK_TIMEOUT_S)
    except Exception as error:  # supervision boundary: an engine that cannot be asked must not keep holds open
        log.warning("the engine of %s cannot be asked about earlier requests: %s", model, error or "no answer")
        return None
    if reply is None:
        return None
    known.update(reply.known)
    return reply.epoch
