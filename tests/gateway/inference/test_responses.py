"""Clients that leave, that never read, that read slowly: each a clean end and right books."""

from __future__ import annotations

import os
import time
from typing import Any

from marketplace.keys import service as keys
from marketplace.store.db import Database
from marketplace.users import service as users

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HELLO}
PROMPT = len("user\nHi\nassistant\n") + 3


def test_a_client_that_leaves_in_the_middle_pays_for_what_was_made(make_house: Any) -> None:
    house = make_house({"tokens": 5000, "interval_ms": 2.0})
    with house.connect() as raw:
        raw.sendall(house.request({**CHAT, "stream": True}))
        seen = b""
        while seen.count(b'"content"') < 4:
            seen += raw.recv(65536)
    ((outcome, billable, prompt, _, completion, cost, reason),) = house.usage()
    assert (outcome, billable, reason) == ("disconnected", 1, "partial_output")
    assert 0 < completion < 5000
    assert cost == prompt * 20 + completion * 60


def test_a_client_that_leaves_a_body_unread(make_house: Any) -> None:
    house = make_house({"tokens": 5000, "interval_ms": 2.0})
    with house.connect() as raw:
        raw.sendall(house.request(CHAT))
        house.eventually(lambda: house.engine.core.snapshot(0).completion_tokens > 5, "tokens are generated")
    ((outcome, _, _, _, completion, _, _),) = house.usage()
    assert outcome == "disconnected" and 0 < completion < 5000


def test_a_client_that_leaves_before_the_first_token(make_house: Any) -> None:
    house = make_house({"tokens": 10, "first_token_ms": 60_000.0})
    with house.connect() as raw:
        raw.sendall(house.request({**CHAT, "stream": True}))
        house.eventually(lambda: house.engine.sessions.live == 1, "the engine has the request")
    ((outcome, billable, _, _, completion, cost, _),) = house.usage()
    assert (outcome, billable, completion, cost) == ("disconnected", 0, 0, 0)


def test_a_client_that_leaves_while_sending_its_body(shared: Any) -> None:
    before = len(shared.usage())
    with shared.connect() as raw:
        raw.sendall(shared.head(length=1000) + b'{"model"')
    assert len(shared.usage()) == before


def test_a_thousand_aborted_streams(make_house: Any) -> None:
    house = make_house({"tokens": 500, "interval_ms": 2.0}, first_balance="1000")
    house.do(lambda: house.gateway.catalogue.find("tiny").capacity.resize(2000, 2000))
    request = house.request({**CHAT, "stream": True, "max_tokens": 500})
    for batch in range(20):
        connections = [house.connect() for _ in range(50)]
        for raw in connections:
            raw.sendall(request)
        for number, raw in enumerate(connections):
            if (number + batch) % 3:  # some leave at once, the others when the answer has begun
                raw.recv(100)
            raw.close()
    house.idle()
    stats = house.gateway.metering.meter.stats
    assert stats.opened == stats.settled + stats.voided
    assert {row[0] for row in house.usage()} <= {"disconnected", "finished"}
    assert house.gateway.catalogue.find("tiny").capacity.in_flight == 0


def test_a_client_that_never_reads_is_cut_off(make_house: Any) -> None:
    house = make_house({"tokens": 100_000, "max_context": 200_000}, slow_client_s=0.3)
    began = time.monotonic()
    with house.connect(receive_buffer=4096) as raw:
        raw.sendall(house.request({**CHAT, "stream": True, "logprobs": True, "top_logprobs": 5}))
        house.eventually(lambda: len(house.gateway.services.answers) == 1, "the request runs")
        house.eventually(lambda: not house.gateway.services.answers, "it was ended")
        house.eventually(lambda: not house.server.server_state.connections, "the connection was closed")
    assert time.monotonic() - began < 10
    ((outcome, billable, _, _, completion, cost, _),) = house.usage()
    assert (outcome, billable) in {("disconnected", 1), ("finished", 1)}
    assert cost > completion * 60 > 0


def test_a_client_that_reads_slowly_gets_everything(make_house: Any) -> None:
    house = make_house({"tokens": 3000}, slow_client_s=5.0)
    with house.connect(receive_buffer=4096) as raw:
        raw.sendall(house.request({**CHAT, "stream": True, "logprobs": True, "max_tokens": 3000}))
        seen = b""
        while b"[DONE]" not in seen[-4096:]:
            seen += raw.recv(2048)
    assert seen.count(b'"token":') == 3000
    assert house.usage()[0][0] == "finished"


def test_keys_of_one_person_are_metered_apart(make_house: Any) -> None:
    """A second key of the same person works beside the first, and is metered under its own id."""
    house = make_house()
    database = Database(house.database_url)
    with database.write() as unit:
        owner = users.first_admin(unit)
        assert owner is not None
        row, secret = keys.create(
            unit,
            kind="user",
            owner_id=owner.id,
            account_id=owner.account_id,
            name="second",
            pepper=house._prepared.pepper,
            now=1,
            random=os.urandom,
        )
    database.close()
    house.eventually(lambda: len(house.gateway.keys) == 2, "the new key is known")
    assert house.client(api_key=secret.text).chat.completions.create(**CHAT).choices
    house.idle()
    assert house.rows("SELECT key_id FROM usage_record") == [(row.id,)]
