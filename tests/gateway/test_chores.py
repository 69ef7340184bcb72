"""The thread of the workers: each at its pace, none ended by another's failure, all ended with the gateway."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from gateway import chores
from gateway.chores import Chore, Chores, mail_of, marketplace_chores
from gateway.settings import Paths, Settings
from marketplace.auth import letters
from marketplace.http.limits import Buckets
from marketplace.http.operation import Context
from marketplace.notify.mail import FolderMail, SmtpMail
from marketplace.store.db import Database
from marketplace.store.vault import Vault
from marketplace.users import service as users

LIMIT_S = 10.0


def wait(event: threading.Event) -> None:
    assert event.wait(LIMIT_S), "it never happened"


@pytest.fixture
def running() -> Iterator[Callable[..., Chores]]:
    """Starts chores; all are stopped at the end."""
    made: list[Chores] = []

    def start(*wanted: Chore) -> Chores:
        made.append(Chores())
        made[-1].start(wanted)
        return made[-1]

    yield start
    for one in made:
        one.stop()
        assert not one._thread.is_alive()


class Work:
    """A worker that counts its passes, and does at each what a test says."""

    def __init__(self, name: str, every_s: float = 0.005, *, enough: int = 3, fails: bool = False) -> None:
        self.passes = 0
        self.threads: set[str] = set()
        self.done = threading.Event()
        self.chore = Chore(name, every_s, self.run)
        self._enough = enough
        self._fails = fails

    async def run(self) -> None:
        self.passes += 1
        self.threads.add(threading.current_thread().name)
        if self.passes >= self._enough:
            self.done.set()
        if self._fails:
            raise ZeroDivisionError(f"pass {self.passes}")


def test_every_chore_runs_at_its_own_pace_in_one_thread(running: Callable[..., Chores]) -> None:
    often, seldom = Work("often", enough=5), Work("seldom", 3600.0, enough=1)
    running(often.chore, seldom.chore)
    wait(often.done)
    wait(seldom.done)
    assert seldom.passes == 1, "the first pass is at once, the next after its rest"
    assert often.threads == seldom.threads == {"chores"}


def test_a_worker_that_raises_goes_on_and_stops_nobody(
    running: Callable[..., Chores], caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Work("broken", fails=True), Work("sound", enough=5)
    running(broken.chore, sound.chore)
    wait(broken.done)
    wait(sound.done)
    complaints = [record for record in caplog.records if record.name == "gateway.chores"]
    assert len(complaints) >= 2 and "broken failed" in complaints[0].getMessage()
    assert complaints[0].exc_info is not None and complaints[0].levelno == logging.ERROR


def test_a_pass_that_runs_may_end(running: Callable[..., Chores]) -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    async def slow() -> None:
        begun.set()
        await asyncio.to_thread(wait, release)
        ended.set()

    one = running(Chore("slow", 1.0, slow))
    wait(begun)
    stopper = threading.Thread(target=one.stop)
    stopper.start()
    release.set()
    stopper.join(LIMIT_S)
    assert one.stopping and ended.is_set() and not one._thread.is_alive() and one._loop.is_closed()


def test_what_takes_too_long_is_cut_off(running: Callable[..., Chores], caplog: pytest.LogCaptureFixture) -> None:
    begun, cut = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    one = running(Chore("endless", 1.0, endless))
    wait(begun)
    before = time.monotonic()
    one.stop(limit_s=0.01)
    assert cut.is_set() and not one._thread.is_alive() and time.monotonic() - before < LIMIT_S
    assert "a chore was cut off" in caplog.text


def test_stopping_twice_or_before_the_start_is_nothing() -> None:
    never = Chores()
    never.stop()
    never.stop()
    assert never._loop.is_closed()
    once = Chores()
    once.start(())
    once.stop()
    once.stop()
    assert once._loop.is_closed()


@pytest.fixture
def context(database: Database) -> Context:
    """What the workers of the marketplace work with."""
    return Context(
        database=database,
        pepper=b"p" * 32,
        vault=Vault(b"s" * 32),
        clock=lambda: time.time_ns() // 1000,
        random=Random(3).randbytes,
        limits=Buckets(),
        public_url="https://h.example",
    )


def register(context: Context, email: str) -> None:
    """Have somebody, and the letter that they confirm their address with."""
    now = context.clock()
    with context.database.write() as unit:
        users.create(unit, email=email, role="user", password_hash="x", now=now, random=context.random)
        letters.ask(unit, "registration", email, now=now, random=context.random)


def delivered(folder: Path, count: int = 1) -> list[str]:
    """Letters in a folder, once there are so many."""
    until, pause = time.monotonic() + LIMIT_S, threading.Event()
    while len(found := sorted(folder.glob("*.eml"))) < count:
        assert time.monotonic() < until, "no letter arrived"
        pause.wait(0.005)
    return [path.read_bytes().decode() for path in found]


def test_the_marketplace_s_workers_deliver_mail_even_when_others_fail(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chores, "MAIL_S", 0.01)
    monkeypatch.setattr(chores, "PAYMENTS_S", 0.01)
    asked = threading.Event()

    def broken(context: Context, stopping: Callable[[], bool]) -> None:
        asked.set()
        raise OSError("the payment provider is on fire")

    monkeypatch.setattr(chores, "reconcile", broken)
    settings = Settings(data=tmp_path)
    one = Chores()
    one.start(marketplace_chores(context, mail_of(settings), one))
    try:
        wait(asked)
        register(context, "ada@example.com")
        (letter,) = delivered(Paths(tmp_path).mail)
    finally:
        one.stop()
    assert "To: ada@example.com" in letter and "https://h.example/verify-email#token=" in letter.replace("=\r\n", "")
    assert "payments failed; it goes on in 0.01 s" in caplog.text and "on fire" in caplog.text
    register(context, "late@example.com")
    assert len(list(Paths(tmp_path).mail.iterdir())) == 1, "nothing works on after the end"


def test_mail_goes_where_the_settings_say(tmp_path: Path) -> None:
    assert isinstance(mail_of(Settings(data=tmp_path)), FolderMail)
    assert isinstance(mail_of(Settings(data=tmp_path, smtp_url="smtp://127.0.0.1:25?tls=none")), SmtpMail)
