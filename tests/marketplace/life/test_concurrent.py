"""Eight clients at once on two nodes that are too small for them, while the nodes report: nobody gets what another has,
and the books balance at every moment."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from marketplace.ledger.money import NANO
from marketplace.placement.tables import gpu_slice_claim
from tests.marketplace.life.invariants import Facts, broken
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import Agent, Rack

CLIENTS = 8


def check(office: Office) -> None:
    with office.database.read() as unit:
        assert broken(Facts(unit, now=office.now)) == []


def client(rack: Rack, who: Caller, times: int) -> Counter[int]:
    """Rent and end, again and again; returns how often it was answered what."""
    seen: Counter[int] = Counter()
    for number in range(times):
        answer = rack.rent(who, "h200.2" if number % 3 == 2 else "h200.1", container=True)
        seen[answer.status] += 1
        if answer.status == 201:
            ended = rack.terminate(who, *answer.body["instance_ids"])
            assert ended.status == 200, ended.body
    return seen


def report(nodes: list[Agent], done: threading.Event) -> int:
    """Let nodes take down what they should until all clients are done; returns how often."""
    rounds = 0
    while not done.is_set():
        for node in nodes:
            node.clean()
            check(node.rack.office)
        rounds += 1
    return rounds


def play(office: Office, times: int) -> Counter[int]:
    rack = Rack(office)
    nodes = [rack.node("g01", gpus=2), rack.node("g02", gpus=2)]
    people = [office.person(balance=10_000 * NANO) for _ in range(CLIENTS)]
    office.context.turns._patience_s = 0  # as if each were in a process of its own
    done = threading.Event()
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        reporting = pool.submit(report, nodes, done)
        try:
            clients = [pool.submit(client, rack, who, times) for who in people]
            seen = sum((one.result() for one in clients), Counter[int]())
        finally:
            done.set()
        assert reporting.result() > 0
    for _ in range(2):
        for node in nodes:
            node.clean()
    check(office)
    with office.database.read() as unit:
        left = select(func.count()).select_from(gpu_slice_claim).where(gpu_slice_claim.c.released_at.is_(None))
        assert unit.select(left).scalar_one() == 0, "everything was given back"
    return seen


def test_eight_clients_never_share_a_gpu(office: Office) -> None:
    seen = play(office, 3)
    assert seen[201] >= 4 and set(seen) <= {201, 409, 503}, seen
    assert seen.total() == CLIENTS * 3


@pytest.mark.slow
def test_eight_clients_for_a_while(office: Office) -> None:
    seen = play(office, 40)
    assert seen[201] >= 40 and set(seen) <= {201, 409, 503}, seen
