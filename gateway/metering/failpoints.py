"""Named places where a test may break the process: every boundary between memory, journal, engine and ledger has one.

In service nothing is armed and a failpoint costs one look at an empty dict. A test arms a name with an action: a
function that raises (the step fails) or calls `os._exit` (the process dies there). `reached` remembers which armed
names were hit, so that a test can assert that each was exercised.
"""

from __future__ import annotations

from collections.abc import Callable

NAMES: tuple[str, ...] = (
    "meter.open.reserved",  # money is taken in memory, the hold is not in the journal yet
    "meter.open.appended",  # the hold is queued for the journal, nobody has been told
    "meter.settle.before_append",  # the answer is complete, its settlement is not queued yet
    "meter.settle.appended",  # the settlement is queued, not durable
    "meter.settle.durable",  # the settlement is durable, the client has not seen [DONE]
    "journal.before_insert",  # records are taken from the queue
    "journal.before_commit",  # the commit is about to be made, nothing of it is on disk
    "journal.after_commit",  # durable, the waiting requests have not been told
    "settler.before_apply",  # records are durable, the ledger's transaction has not begun
    "settler.inside_apply",  # the ledger's transaction is complete but not committed
    "settler.after_apply",  # the ledger has committed, memory and journal do not know
    "settler.before_prune",  # memory knows, the journal still has the rows
    "recovery.before_replay",  # start-up, nothing re-applied
    "recovery.after_replay",  # the tail is in the ledger, open holds are not ended
    "recovery.before_append",  # verdicts on open holds are formed, none is durable
    "recovery.after_append",  # verdicts are durable, not in the ledger
)

Action = Callable[[], None]

_armed: dict[str, Action] = {}
reached: set[str] = set()


def arm(name: str, action: Action) -> None:
    """Run `action` whenever `name` is hit. Raises KeyError for a name that does not exist."""
    if name not in NAMES:
        raise KeyError(name)
    _armed[name] = action


def disarm() -> None:
    """Take every action away and forget what was reached."""
    _armed.clear()
    reached.clear()


def hit(name: str) -> None:
    """The boundary `name` is being crossed."""
    if _armed and (action := _armed.get(name)) is not None:
        reached.add(name)
        action()
