"""Engines on other machines: addresses, listening, and who may speak.

Where a Unix socket's file says who may connect, a TCP connection begins with both sides proving that they know one
secret, without saying it: a challenge, then an HMAC-SHA256 over both sides' random numbers from the caller, then one
from the engine. Until then a connection can send one small frame and nothing else, for a few seconds. What follows is
neither encrypted nor signed: it belongs on a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

import msgspec

from engine.wire import WireError

SECRET_VARIABLE = "HEADRACE_ENGINE_SECRET"
"""Where an engine process finds its secret: other users of a machine can read command lines, not environments."""
SHORTEST_SECRET = 16
"""Bytes of a secret that are accepted at least."""
NONCE_BYTES = 32
LARGEST_OPENING = 512
"""Most bytes of a frame before both sides have proved themselves."""
STRANGER_S = 5.0
"""Seconds that a connection has to prove itself."""
MOST_STRANGERS = 64
"""Connections that have not proved themselves yet; one more ends the oldest."""

_LENGTH = struct.Struct("<I")
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""A machine that vanishes without a word is noticed within 20 seconds (the last value is in milliseconds)."""


class DeniedError(Exception):
    """One side does not know the secret; the message says which."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine listens on a network, and what it takes to speak with it."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret, which belongs in no log."""
        return f"Endpoint({shown(self.host, self.port)})"


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """The engine's first frame."""

    nonce: bytes


class Response(msgspec.Struct, tag="response", frozen=True):
    """The caller's only frame before it is known."""

    nonce: bytes
    proof: bytes


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """The engine's own proof; its greeting follows."""

    proof: bytes


class Denied(msgspec.Struct, tag="denied", frozen=True):
    """The caller does not know the secret; the connection ends."""

    message: str


_encoder = msgspec.msgpack.Encoder()
_of_caller = msgspec.msgpack.Decoder(Response)
_of_engine: msgspec.msgpack.Decoder[Challenge | Accepted | Denied] = msgspec.msgpack.Decoder(
    Challenge | Accepted | Denied
)


class Gate:
    """The engine's side of one connection, until the caller is known. Without a socket or a clock."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        """`nonce` is NONCE_BYTES random bytes, new for each connection."""
        self._secret = secret
        self._nonce = nonce
        self._opening = _Opening()
        self.challenge = _framed(Challenge(nonce))
        """What to send first."""

    def feed(self, data: bytes) -> bytes | None:
        """Take what the caller sent. Returns what lets it in, or None while more has to come. Raises WireError for what
        is no response, DeniedError for a wrong one."""
        body = self._opening.feed(data)
        if body is None:
            return None
        try:
            response = _of_caller.decode(body)
        except msgspec.MsgspecError as error:
            raise WireError("it does not answer the challenge") from error
        if self._opening.rest or len(response.nonce) != NONCE_BYTES:
            raise WireError("it does not answer the challenge")
        if not hmac.compare_digest(response.proof, _proof(self._secret, b"caller", self._nonce, response.nonce)):
            raise DeniedError("the secret is wrong")
        return _framed(Accepted(_proof(self._secret, b"engine", self._nonce, response.nonce)))


class Caller:
    """The client's side of one connection, until each knows the other. Without a socket."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        """`nonce` is NONCE_BYTES random bytes, new for each connection."""
        self._secret = secret
        self._nonce = nonce
        self._opening = _Opening()
        self._challenge: bytes | None = None
        self.rest = b""
        """What came after the engine's proof."""

    def feed(self, data: bytes) -> bytes | None:
        """Take what the engine sent. Returns what to send to it (empty while more has to come), or None when the engine
        has proved itself. Raises WireError, DeniedError."""
        answer = b""
        while (body := self._opening.feed(data)) is not None:
            data = b""
            try:
                frame = _of_engine.decode(body)
            except msgspec.MsgspecError as error:
                raise WireError("it does not ask for the secret: no engine of ours listens there") from error
            match frame:
                case Challenge(nonce=nonce) if self._challenge is None and len(nonce) == NONCE_BYTES:
                    self._challenge = nonce
                    answer = _framed(Response(self._nonce, _proof(self._secret, b"caller", nonce, self._nonce)))
                case Accepted(proof=proof) if self._challenge is not None:
                    if not hmac.compare_digest(proof, _proof(self._secret, b"engine", self._challenge, self._nonce)):
                        raise DeniedError("who listens there does not know the secret")
                    self.rest = self._opening.rest
                    return None
                case Denied(message=message):
                    raise DeniedError(f"the engine does not let us in: {message}")
                case _:
                    raise WireError("it does not ask for the secret as it should")
        return answer


def denied(message: str) -> bytes:
    """The frame that tells a caller why the connection ends."""
    return _framed(Denied(message))


class _Opening:
    """Cuts small frames off the beginning of a stream, and holds little."""

    def __init__(self) -> None:
        self.rest = b""
        """What has come and is in no frame yet."""

    def feed(self, data: bytes) -> bytes | None:
        """The next frame's body, None while it is not complete. Raises WireError for a large one."""
        held = self.rest = self.rest + data
        if len(held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(held)
        if length > LARGEST_OPENING:
            raise WireError(f"its first frame has {length} bytes")
        end = _LENGTH.size + length
        if len(held) < end:
            return None
        self.rest = held[end:]
        return held[_LENGTH.size : end]


def _framed(frame: Challenge | Response | Accepted | Denied) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def _proof(secret: bytes, side: bytes, engine_nonce: bytes, caller_nonce: bytes) -> bytes:
    """The sides' proofs differ, so that none can be sent back as the other's."""
    return hmac.digest(secret, b"headrace engine 1 " + side + engine_nonce + caller_nonce, hashlib.sha256)


def new_nonce() -> bytes:
    """Random bytes for one connection."""
    return os.urandom(NONCE_BYTES)


def read_secret(environment: dict[str, str] | os._Environ[str]) -> bytes:
    """Take the secret out of the environment, so that no process that this one starts has it. Raises ValueError where
    there is none or it is too short to be one."""
    secret = environment.pop(SECRET_VARIABLE, "").encode()
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(
            f"--listen needs a secret of at least {SHORTEST_SECRET} characters in {SECRET_VARIABLE}: whoever reaches "
            "the port could use the engine"
        )
    return secret


def read_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6 address]:port". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not bare or (":" in bare) != bracketed or not (port.isascii() and port.isdecimal()):
        raise ValueError(f"{text!r} is not an address like 10.0.0.1:7000 or [fd00::1]:7000")
    if int(port) > 65535:
        raise ValueError(f"{text!r} has a port above 65535")
    return bare, int(port)


def shown(host: str, port: int) -> str:
    """The address as read_address takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_at(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens there; port 0 takes a free one. Raises OSError, naming the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OSError(error.errno, f"cannot listen at {shown(host, port)}: {error.strerror}") from error
    return listener


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and notice a machine that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
