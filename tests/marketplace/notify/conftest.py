"""A real SMTP server in the event loop of a test, with and without TLS."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, Envelope
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Received:
    """What arrived at a server, and what it answers to recipients and contents."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.logins: list[tuple[bytes, bytes]] = []
        self.recipient_answer = "250 OK"
        self.content_answer = "250 OK"
        self.port = 0

    async def handle_RCPT(  # noqa: N802 - the name is aiosmtpd's
        self, server: Any, session: Any, envelope: Envelope, address: str, options: Any
    ) -> str:
        if self.recipient_answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return self.recipient_answer

    async def handle_DATA(  # noqa: N802
        self, server: Any, session: Any, envelope: Envelope
    ) -> str:
        if self.content_answer.startswith("250"):
            self.envelopes.append(envelope)
        return self.content_answer

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        self.logins.append((data.login, data.password))
        return AuthResult(success=data.password == b"right: p@ss", handled=False)

    def message(self) -> EmailMessage:
        """The only mail that arrived, as a client reads it."""
        (envelope,) = self.envelopes
        assert isinstance(envelope.content, bytes)
        made = message_from_bytes(envelope.content, policy=default)
        assert isinstance(made, EmailMessage)
        return made


MakeServer = Callable[..., AbstractAsyncContextManager[Received]]


class Authority:
    """A certificate for 127.0.0.1 that signs itself: file for clients, context for the server."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        day = datetime.timedelta(days=1)
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .sign(key, hashes.SHA256())
        )
        self.file = folder / "ca.pem"
        self.file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        private = folder / "key.pem"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.file, private)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom clients of the tests' servers may trust."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def smtp_server(authority: Authority) -> MakeServer:
    """Runs servers: `tls` is "none", "starttls" or "tls"; with `auth` they demand a login."""

    @asynccontextmanager
    async def run(tls: str = "none", *, auth: bool = False, port: int = 0) -> AsyncIterator[Received]:
        received = Received()
        protocols: list[SMTP] = []
        offered = authority.context if tls == "starttls" else None

        def protocol() -> SMTP:
            made = SMTP(
                received,
                hostname="test",
                tls_context=offered,
                require_starttls=tls == "starttls",
                authenticator=received.authenticate if auth else None,
                auth_required=auth,
                auth_require_tls=tls == "starttls",
                loop=asyncio.get_running_loop(),
            )
            protocols.append(made)
            return made

        server = await asyncio.get_running_loop().create_server(
            protocol, "127.0.0.1", port, ssl=authority.context if tls == "tls" else None
        )
        async with server:
            received.port = server.sockets[0].getsockname()[1]
            yield received
        for made in protocols:  # it leaves connections open whose TLS failed
            writer = getattr(made, "_writer", None)
            for transport in (made.transport, made._original_transport, writer and writer.transport):
                if transport is not None:
                    transport.abort()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=0.5)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)

    return run
