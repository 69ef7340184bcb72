"""Letters on their way: a real SMTP server, with TLS and without, and the folder that stands in for one."""

from __future__ import annotations

import asyncio
import email
import logging
import stat
from email.policy import default
from typing import TYPE_CHECKING

import msgspec
import pytest

from marketplace.notify import mail
from marketplace.notify.mail import (
    FolderMail,
    Letter,
    MailError,
    Sender,
    SmtpMail,
    UndeliverableError,
    UnreachableError,
    message,
    read_sender,
    read_smtp_url,
)
from marketplace.notify.rules import AddressError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.marketplace.notify.conftest import Authority, MakeServer

SENDER = Sender("Headrace", "no-reply@headrace.example")
LETTER = Letter(
    id="019a0f6c-2a00-7abc-8def-000000000001",
    to="ada@example.com",
    subject="Hällo",
    text="Hello\n.\nworld\n",
    html="<p>Hello</p>",
    at=1_800_000_000_000_000,
)


def send(url: str, letter: Letter = LETTER) -> MailError | None:
    """Send a letter; returns the trouble."""

    async def work() -> None:
        await SmtpMail(read_smtp_url(url), SENDER).send(letter)

    return asyncio.run(_trouble(work()))


async def _trouble(work: object) -> MailError | None:
    try:
        await work  # type: ignore[misc] # a coroutine of a test
    except MailError as error:
        return error
    return None


def test_a_letter_arrives_whole_over_starttls_with_a_login(smtp_server: MakeServer, authority: Authority) -> None:
    async def work() -> None:
        async with smtp_server("starttls", auth=True) as received:
            url = f"smtp://us%40er:right%3A%20p%40ss@127.0.0.1:{received.port}?ca={authority.file}"
            await SmtpMail(read_smtp_url(url), SENDER).send(LETTER)
        assert received.logins == [(b"us@er", b"right: p@ss")]
        (envelope,) = received.envelopes
        assert (envelope.mail_from, envelope.rcpt_tos) == ("no-reply@headrace.example", ["ada@example.com"])
        read = received.message()
        assert read["Subject"] == "Hällo" and read["From"] == "Headrace <no-reply@headrace.example>"
        assert read["Message-ID"] == f"<{LETTER.id}@headrace.example>" and read["Auto-Submitted"] == "auto-generated"
        text, html = read.iter_parts()
        assert (
            text.get_content().splitlines() == ["Hello", ".", "world"] and html.get_content().strip() == "<p>Hello</p>"
        )

    asyncio.run(work())


def test_a_letter_arrives_over_tls_and_in_clear_where_that_is_asked_for(
    smtp_server: MakeServer, authority: Authority
) -> None:
    async def work() -> None:
        async with smtp_server("tls") as received:
            url = f"smtps://127.0.0.1:{received.port}?ca={authority.file}"
            await SmtpMail(read_smtp_url(url), SENDER).send(LETTER)
        assert received.message()["To"] == "ada@example.com"
        async with smtp_server() as received:
            await SmtpMail(read_smtp_url(f"smtp://127.0.0.1:{received.port}?tls=none"), SENDER).send(LETTER)
        assert received.message()["To"] == "ada@example.com"

    asyncio.run(work())


def test_nothing_is_said_to_a_server_without_tls_or_of_an_unknown_authority(
    smtp_server: MakeServer, authority: Authority
) -> None:
    async def work() -> None:
        for tls, url in (
            ("none", f"smtp://u:secret@127.0.0.1:%d?ca={authority.file}"),  # no STARTTLS offered
            ("none", f"smtps://u:secret@127.0.0.1:%d?ca={authority.file}"),  # no TLS spoken
            ("starttls", "smtp://u:secret@127.0.0.1:%d"),  # the system does not know who signed
        ):
            async with smtp_server(tls, auth=tls != "none") as received:
                trouble = await _trouble(SmtpMail(read_smtp_url(url % received.port), SENDER).send(LETTER))
            assert isinstance(trouble, UnreachableError), (tls, url)
            assert received.logins == [] and received.envelopes == []
            assert "secret" not in str(trouble) and "ada" not in str(trouble)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("recipient", "content", "kind"),
    [
        ("550 no such <ada@example.com>", "250 OK", UndeliverableError),
        ("452 mailbox of ada@example.com full", "250 OK", MailError),
        ("250 OK", "554 we do not like it", UndeliverableError),
        ("250 OK", "451 later", MailError),
    ],
)
def test_a_refusal_is_for_ever_or_for_now(
    smtp_server: MakeServer, recipient: str, content: str, kind: type[MailError]
) -> None:
    async def work() -> None:
        async with smtp_server() as received:
            received.recipient_answer, received.content_answer = recipient, content
            url = f"smtp://127.0.0.1:{received.port}?tls=none"
            trouble = await _trouble(SmtpMail(read_smtp_url(url), SENDER).send(LETTER))
        assert type(trouble) is kind and "ada" not in str(trouble) and "<" not in str(trouble)

    asyncio.run(work())


def test_a_wrong_password_is_trouble_with_the_server(smtp_server: MakeServer, authority: Authority) -> None:
    async def work() -> None:
        async with smtp_server("starttls", auth=True) as received:
            url = f"smtp://u:wrong@127.0.0.1:{received.port}?ca={authority.file}"
            trouble = await _trouble(SmtpMail(read_smtp_url(url), SENDER).send(LETTER))
        assert isinstance(trouble, UnreachableError) and "535" in str(trouble) and received.logins

    asyncio.run(work())


def test_a_server_that_is_down_or_never_answers(smtp_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with smtp_server() as received:
            port = received.port
        down = await _trouble(SmtpMail(read_smtp_url(f"smtp://127.0.0.1:{port}?tls=none"), SENDER).send(LETTER))
        assert isinstance(down, UnreachableError)

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.read()
            finally:
                writer.close()

        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        async with silent:
            monkeypatch.setattr(mail, "SEND_US", 50_000)
            port = silent.sockets[0].getsockname()[1]
            mute = await _trouble(SmtpMail(read_smtp_url(f"smtp://127.0.0.1:{port}?tls=none"), SENDER).send(LETTER))
        assert isinstance(mute, UnreachableError) and "Timeout" in str(mute)

    asyncio.run(work())


@pytest.mark.parametrize(
    "to",
    [
        "a@b.c\r\nBcc: victim@example.com",
        "a@b.c\nRCPT TO:<victim@example.com>",
        "a@b.c, victim@example.com",
        "a@b.c;victim@example.com",
        "A <a@b.c>",
        "a@b.c>\r\nDATA",
        '"a\r\n b"@example.com',
        "a b@example.com",
        "a@[127.0.0.1]",
        "a@b..c",
        "@example.com",
        "a@",
        "a\0@example.com",
        "ä@example.com",
        "x" * 65 + "@example.com",
        "",
    ],
)
def test_no_hostile_address_reaches_a_server(smtp_server: MakeServer, to: str) -> None:
    async def work() -> None:
        async with smtp_server() as received:
            url = f"smtp://127.0.0.1:{received.port}?tls=none"
            letter = Letter(id="1", to=to, subject="s", text="t", html="h", at=0)
            trouble = await _trouble(SmtpMail(read_smtp_url(url), SENDER).send(letter))
        assert isinstance(trouble, UndeliverableError) and received.envelopes == []
        assert "victim" not in str(trouble)

    asyncio.run(work())


def test_a_hostile_subject_stays_one_header(smtp_server: MakeServer) -> None:
    subject = "Hi\r\nBcc: victim@example.com\r\n\r\n<script>\x00\x1b[31m" + "y" * 400

    async def work() -> None:
        async with smtp_server() as received:
            url = f"smtp://127.0.0.1:{received.port}?tls=none"
            letter = Letter(id="1", to="a@bücher.example", subject=subject, text="t\r\n.\r\nQUIT\r\n", html="h", at=0)
            await SmtpMail(read_smtp_url(url), SENDER).send(letter)
        read = received.message()
        assert received.envelopes[0].rcpt_tos == ["a@xn--bcher-kva.example"] and read["Bcc"] is None
        assert read["Subject"].startswith("Hi Bcc: victim@example.com <script> [31my") and len(read["Subject"]) == 200
        assert sorted(read.keys()) == [
            "Auto-Submitted", "Content-Type", "Date", "From", "MIME-Version", "Message-ID", "Subject", "To"
        ]  # fmt: skip
        assert len(received.envelopes) == 1

    asyncio.run(work())


def test_without_a_server_letters_are_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = FolderMail(tmp_path / "data" / "mail", SENDER)
    letter = Letter(
        **{**{name: getattr(LETTER, name) for name in LETTER.__struct_fields__}, "link": "http://x/#token=t"}
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # a second delivery of the same letter is the same file
            asyncio.run(folder.send(letter))
    (path,) = (tmp_path / "data" / "mail").iterdir()
    assert path.name == f"{LETTER.id}.eml" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert email.message_from_bytes(path.read_bytes(), policy=default)["Subject"] == "Hällo"
    assert "http://x/#token=t" in caplog.text and str(path) in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(UnreachableError):
        asyncio.run(FolderMail(tmp_path / "file", SENDER).send(letter))


@pytest.mark.parametrize(
    ("url", "host", "port", "security"),
    [
        ("smtp://mail.example.com", "mail.example.com", 587, "starttls"),
        ("smtps://u:p@mail.example.com/", "mail.example.com", 465, "tls"),
        ("smtp://localhost:25?tls=none", "localhost", 25, "none"),
        ("smtp://[::1]:2525?tls=none", "::1", 2525, "none"),
    ],
)
def test_addresses_of_servers(url: str, host: str, port: int, security: str) -> None:
    server = read_smtp_url(url)
    assert (server.host, server.port, server.security) == (host, port, security)
    assert repr(server) == f"SmtpServer({host}:{port}, {security})"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "mail.example.com",
        "http://mail.example.com",
        "smtp://",
        "smtp://user:secret@",
        "smtp://mail.example.com:99999",
        "smtp://mail.example.com/path",
        "smtp://user@mail.example.com",
        "smtp://user:secret@localhost?tls=none",
        "smtps://mail.example.com?tls=none",
        "smtp://mail.example.com?tls=maybe",
        "smtp://mail.example.com?verify=no",
        "smtp://mail.example.com?ca=/nowhere/ca.pem",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_smtp_url(url)
    assert "secret" not in str(caught.value)


def test_senders() -> None:
    assert read_sender("Headrace <no-reply@example.com>") == Sender("Headrace", "no-reply@example.com")
    assert read_sender("no-reply@example.com").address == "no-reply@example.com"
    for wrong in ("", "Headrace", "Headrace <no-reply>", "a@b.c, d@e.f", "A\r\nBcc: x@y <a@b.c>"):
        with pytest.raises(AddressError):
            read_sender(wrong)
    made = message(LETTER, Sender('He said "hi", <b>', "a@b.c"))
    assert email.message_from_bytes(made.as_bytes(), policy=default)["From"].addresses[0].addr_spec == "a@b.c"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (f"https://h.example/verify-email#token={'x' * 100}\n", True),
        (f"Grüße https://h.example/verify-email#token={'x' * 100}\n", False),
        ("x" * 999 + "\n", False),
    ],
)
def test_a_link_is_whole_in_the_source_where_the_text_allows_it(text: str, whole: bool) -> None:
    made = message(msgspec.structs.replace(LETTER, text=text), SENDER)
    part = made.get_body(("plain",))
    assert part is not None and part.get_content() == text
    source = made.as_bytes().replace(b"\r\n", b"\n")
    assert (text.encode() in source) is whole and max(map(len, source.splitlines())) <= 998
