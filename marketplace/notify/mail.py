"""How letters leave: through an SMTP server, or, where none is named, into a folder.

An SMTP server is named by an address: `smtp://user:password@host:587` demands STARTTLS, `smtps://…:465` speaks TLS
from the first byte, and `smtp://host:25?tls=none` sends in clear, for a relay on the same machine; it takes no
password. `ca=FILE` trusts the authorities of a file instead of the system's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import aiosmtplib
import msgspec

from marketplace.notify.rules import SEND_US, AddressError, mail_address, subject_line

log = logging.getLogger(__name__)

_PERMANENT = range(500, 600)
_STEP_S = 20.0
"""How long the server may take to answer one command."""
_LONGEST_LINE = 998
"""of a mail that is sent as it is (RFC 5322, 2.1.1)"""
_PORTS = {"smtp": 587, "smtps": 465}


class MailError(Exception):
    """A letter did not leave; it may later. The message holds no address and no secret."""


class UndeliverableError(MailError):
    """This letter will never leave: nobody has this address, or the server refuses what it says."""


class UnreachableError(MailError):
    """No letter leaves now: the server is down, refuses TLS, or does not know us."""


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A letter to one person. The same id is the same letter, however often it is sent. `link` is what to follow, or
    empty."""

    id: str
    to: str
    subject: str
    text: str
    html: str
    at: int
    link: str = ""

    def __repr__(self) -> str:
        """Leave everything personal out."""
        return f"Letter({self.id})"


class Sender(msgspec.Struct, frozen=True):
    """Whom letters come from."""

    name: str
    address: str


class Mail(Protocol):
    """A way for letters to leave."""

    async def send(self, letter: Letter) -> None:
        """Hand over a letter; returns when it is in other hands. MailError."""


def read_sender(text: str) -> Sender:
    """Read `Name <address>` or an address alone. AddressError."""
    name, opened, address = text.removesuffix(">").rpartition("<")
    if not text.isprintable() or bool(opened) != text.endswith(">"):
        raise AddressError("not a sender like 'Headrace <no-reply@example.com>'")
    return Sender(subject_line(name), mail_address(address))


def message(letter: Letter, sender: Sender) -> EmailMessage:
    """Return the letter as a message with a text and an HTML part. AddressError. Nothing in it can add a header."""
    made = EmailMessage(policy=SMTP)
    made["From"] = Address(sender.name, addr_spec=sender.address)
    made["To"] = Address(addr_spec=mail_address(letter.to))
    made["Subject"] = subject_line(letter.subject)
    made["Date"] = datetime.fromtimestamp(letter.at // 1_000_000, UTC)
    made["Message-ID"] = f"<{letter.id}@{sender.address.rpartition('@')[2]}>"
    made["Auto-Submitted"] = "auto-generated"
    # Plain where it can be: links stay whole for those who look at the source, as in the folder of mails.
    plain = letter.text.isascii() and all(len(line) <= _LONGEST_LINE for line in letter.text.splitlines())
    made.set_content(letter.text, cte="7bit" if plain else None)
    made.add_alternative(letter.html, subtype="html")
    return made


class FolderMail:
    """Writes each letter into a folder, as ID.eml, and logs what it is about: for one who tries Headrace without a
    mail server."""

    def __init__(self, folder: Path, sender: Sender) -> None:
        self._folder = folder
        self._sender = sender

    async def send(self, letter: Letter) -> None:
        """Write the file, whole or not at all. MailError when the folder cannot be written."""
        content = _made(letter, self._sender).as_bytes()
        path = self._folder / f"{letter.id}.eml"
        beside = path.with_suffix(".part")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            beside.replace(path)
        except OSError as error:
            raise UnreachableError(f"{self._folder} cannot be written: {error.strerror}") from error
        link = f", its link is {letter.link}" if letter.link else ""
        log.warning("no mail server is set: %r is in %s%s", letter.subject, path, link)


class SmtpServer(msgspec.Struct, frozen=True, kw_only=True):
    """Where letters are handed over, read from an address."""

    host: str
    port: int
    security: str
    """"tls" from the first byte, "starttls" or "none" """
    username: str | None = None
    password: str | None = None
    ca: str | None = None

    def __repr__(self) -> str:
        """Leave the password out."""
        return f"SmtpServer({self.host}:{self.port}, {self.security})"


def read_smtp_url(url: str) -> SmtpServer:
    """Read the address of an SMTP server. ValueError, whose message does not repeat the address: it may hold a
    password."""
    try:
        parts = urlsplit(url)
        port = parts.port
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError as error:
        raise ValueError("it is not an address") from error
    if parts.scheme not in _PORTS or not parts.hostname or parts.path not in ("", "/") or parts.fragment:
        raise ValueError("it is not like smtp://user:password@host:587 or smtps://user:password@host:465")
    tls = options.pop("tls", "required")
    ca = options.pop("ca", None)
    if options or tls not in ("required", "none") or (tls == "none" and parts.scheme == "smtps"):
        raise ValueError("it takes the options tls=none (with smtp://) and ca=FILE")
    return _server(parts, port, tls == "none", ca)


def _server(parts: SplitResult, port: int | None, clear: bool, ca: str | None) -> SmtpServer:
    username = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    if clear and username is not None:
        raise ValueError("a password is not sent without TLS")
    if (username is None) != (password is None):
        raise ValueError("a user name comes with a password")
    if ca is not None and not Path(ca).is_file():
        raise ValueError("ca names a file that is not there")
    return SmtpServer(
        host=parts.hostname or "",
        port=_PORTS[parts.scheme] if port is None else port,
        security="none" if clear else "tls" if parts.scheme == "smtps" else "starttls",
        username=username,
        password=password,
        ca=ca,
    )


class SmtpMail:
    """Hands letters to an SMTP server, each over a connection of its own."""

    def __init__(self, server: SmtpServer, sender: Sender) -> None:
        self._server = server
        self._sender = sender
        self._tls = None if server.security == "none" else ssl.create_default_context(cafile=server.ca)

    async def send(self, letter: Letter) -> None:
        """Hand a letter over. MailError; after a time-out nobody knows whether the server has it."""
        content = _made(letter, self._sender)
        server = self._server
        client = aiosmtplib.SMTP(
            hostname=server.host,
            port=server.port,
            username=server.username,
            password=server.password,
            use_tls=server.security == "tls",
            start_tls=server.security == "starttls",
            tls_context=self._tls,
            timeout=_STEP_S,
        )
        try:
            async with asyncio.timeout(SEND_US / 1_000_000):
                await client.connect()
                await client.send_message(content, sender=self._sender.address)
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as error:
            raise _judged(error) from error
        finally:
            # What became of the letter is known by now: a server that is rude at parting changes nothing.
            with contextlib.suppress(aiosmtplib.SMTPException, OSError, TimeoutError):
                if client.is_connected:
                    await client.quit(timeout=_STEP_S)
            client.close()


def _made(letter: Letter, sender: Sender) -> EmailMessage:
    try:
        return message(letter, sender)
    except ValueError as error:  # AddressError, or a header that the library refuses
        raise UndeliverableError("no mail can be made for this address") from error


def _judged(error: Exception) -> MailError:
    """What an error of the server means for the letter. The server's words stay out: they repeat addresses."""
    if isinstance(error, aiosmtplib.SMTPRecipientsRefused):
        code = error.recipients[0].code
        return (UndeliverableError if code in _PERMANENT else MailError)(f"the recipient was refused: {code}")
    if isinstance(error, aiosmtplib.SMTPDataError):
        return (UndeliverableError if error.code in _PERMANENT else MailError)(f"the mail was refused: {error.code}")
    if isinstance(error, aiosmtplib.SMTPResponseException):
        return UnreachableError(f"the server refuses us: {type(error).__name__} {error.code}")
    return UnreachableError(f"the server cannot be used: {type(error).__name__}")
