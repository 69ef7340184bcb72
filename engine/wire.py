"""Frames between the gateway's engine client and the engine process: msgpack structs, length-prefixed, over a Unix
socket.

One connection carries any number of requests. Every frame is `uint32 little-endian length` + msgpack body. A body is
one tagged struct of ClientFrame (towards the engine) or EngineFrame (from it). Token ids travel as raw little-endian
int32 bytes: decoding 2,048 of them as a list would cost a hundred times as much.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from engine.sampling_params import SamplingParams

PROTOCOL = 1
MAX_FRAME = 64 * 1024 * 1024

FinishReason = Literal["stop", "length", "abort", "error"]
RefusalCode = Literal["queue_full", "overloaded", "too_long", "invalid", "draining", "unknown_adapter"]
"""overloaded: its first token would come too late."""


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """Start a sequence. Submitting a known request_id again changes nothing; its remaining output goes to this
    connection.
    """

    request_id: str
    prompt: bytes
    """int32 little-endian token ids, at least one"""
    params: SamplingParams
    priority: int = 0
    """Lower runs first; equal priorities run first come, first served."""
    salt: str = ""
    """Tenant of the prefix cache: prompts share cached pages only under the same salt."""
    adapter: str = ""
    """Name of the adapter that it is computed with; empty for the model alone."""
    follows: bool = False
    """True for one more answer to a request whose first answer was submitted before: it is taken with that one."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End a sequence now. The answer is a Progress with finish_reason "abort" and final counters, also for one that
    has ended.
    """

    request_id: str


class UsageQuery(msgspec.Struct, tag="usage?", frozen=True):
    """Ask for the counters of requests, running or ended within the retention."""

    query_id: int
    request_ids: list[str]


class SnapshotQuery(msgspec.Struct, tag="snapshot?", frozen=True):
    """Ask for the engine's queues and gauges."""

    query_id: int


class RestQuery(msgspec.Struct, tag="rest?", frozen=True):
    """Give back the memory that an engine without requests can do without, or take it again."""

    query_id: int
    asleep: bool


class AdapterQuery(msgspec.Struct, tag="adapter?", frozen=True):
    """Load an adapter from a folder, or with an empty folder unload it: who uses it goes on."""

    query_id: int
    name: str
    folder: str = ""


class AdapterReply(msgspec.Struct, tag="adapter", frozen=True):
    """The adapters that are loaded now; error: why what was asked for was not done."""

    query_id: int
    names: list[str]
    error: str = ""


class Counters(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Cumulative token counts of one sequence."""

    prompt: int = 0
    cached: int = 0
    """Prompt tokens whose KV came from the prefix cache; a subset of prompt."""
    completion: int = 0
    started: bool = False
    """True once any of the prompt was computed (a request cancelled in the queue costs nothing)."""
    accepted: int = 0
    """Of the completion, tokens that had been guessed: they took no step of their own."""
    rejected: int = 0
    """Guesses that were computed and dropped; no part of the completion."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of one generated token; top is ordered, most probable first."""

    logprob: float
    top: list[tuple[int, float]]


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one sequence, and its end when finish_reason is set. Sent exactly once per token, in order."""

    request_id: str
    tokens: bytes = b""
    """int32 little-endian ids generated since the last Progress (a stop token that ended the sequence included)"""
    logprobs: list[TokenLogprobs] | None = None
    """one per token in `tokens`, when asked for"""
    counters: Counters = Counters()
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """the end-of-sequence or stop token that ended the sequence"""
    error: str | None = None
    """message, when finish_reason is "error\""""
    vector: bytes | None = None
    """float32 little-endian, the embedding of the prompt: all that an embedding model says"""


class Step(msgspec.Struct, tag="step", frozen=True):
    """Everything one engine step has to say to one connection."""

    progress: list[Progress]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A Submit that was not accepted; nothing was computed."""

    request_id: str
    code: RefusalCode
    message: str
    retry_after_s: float = 0.0
    """When it may be worth another try; 0: not known"""


class Welcome(msgspec.Struct, tag="welcome", frozen=True, kw_only=True):
    """First frame on every connection, sent when the engine is ready to serve."""

    protocol: int
    epoch: str
    """Unique per engine process: counters of another epoch are gone."""
    model: str
    max_context: int
    vocab_size: int
    kv_tokens: int
    """Capacity of the KV cache in tokens."""
    pid: int
    dimensions: int = 0
    """Numbers of a vector of an embedding model; 0 for a model that generates."""


class UsageReply(msgspec.Struct, tag="usage", frozen=True):
    """Counters of the requests that are known; finished is False for those still running."""

    query_id: int
    epoch: str
    known: dict[str, Usage]


class Usage(msgspec.Struct, frozen=True):
    """Counters of one request and how it ended (None: it runs)."""

    counters: Counters
    finish_reason: FinishReason | None


class Rested(msgspec.Struct, tag="rested", frozen=True):
    """Answer to a RestQuery: what the engine is now, and why it is not what was asked for."""

    query_id: int
    asleep: bool
    seconds: float = 0.0
    """How long it took."""
    error: str = ""


class Snapshot(msgspec.Struct, tag="snapshot", frozen=True, kw_only=True):
    """Queues and gauges at one moment."""

    query_id: int
    epoch: str
    running: int
    waiting: int
    queued_tokens: int
    """Prompt tokens that wait to be computed."""
    kv_pages_total: int
    kv_pages_used: int
    """Pages owned by live sequences."""
    kv_pages_cached: int
    """Pages owned by nobody whose content can still be hit."""
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    last_step_ms: float
    accepted_tokens: int = 0
    """Guessed tokens that stood, ..."""
    rejected_tokens: int = 0
    """... and that were computed and dropped."""
    late_compilations: int = 0
    """Kernels compiled and graphs captured since the engine was ready: anything but 0 is a defect."""
    wait_ms: float = 0.0
    """Predicted wait of a long prompt that came now, before its own tokens are computed."""


ClientFrame = Submit | Abort | UsageQuery | SnapshotQuery | RestQuery | AdapterQuery
EngineFrame = Welcome | Step | Refused | UsageReply | Snapshot | Rested | AdapterReply

_LENGTH = struct.Struct("<I")
_TOKEN = struct.Struct("<i")
_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientFrame] = msgspec.msgpack.Decoder(ClientFrame)
_engine_decoder: msgspec.msgpack.Decoder[EngineFrame] = msgspec.msgpack.Decoder(EngineFrame)


class WireError(Exception):
    """The peer sent bytes that are not a frame of this protocol."""


def encode(frame: ClientFrame | EngineFrame) -> bytes:
    """Return the frame with its length prefix."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frame bodies; feed() may be called with any split of the stream."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Append data and return the bodies that are complete.

        Raises WireError on a frame that announces more than MAX_FRAME bytes: the stream is lost, close the connection.
        """
        rest = self._rest
        if rest:
            rest += data
            data = bytes(rest) if _complete(rest) else b""
            if not data:
                return []
            rest.clear()
        bodies: list[bytes] = []
        start, size = 0, len(data)
        while size - start >= 4:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > MAX_FRAME:
                raise WireError(f"frame of {length} bytes is over the limit of {MAX_FRAME}")
            end = start + 4 + length
            if size < end:
                break
            bodies.append(data[start + 4 : end])
            start = end
        if start < size:
            rest += data[start:]
        return bodies

    @property
    def pending(self) -> int:
        """Bytes held of a frame that is not complete yet."""
        return len(self._rest)


def _complete(buffer: bytearray) -> bool:
    """True when the first frame is whole, or too long and to be refused; a large one is copied once, at its end."""
    if len(buffer) < 4:
        return False
    length: int = _LENGTH.unpack_from(buffer)[0]
    return length > MAX_FRAME or len(buffer) >= 4 + length


def decode_client(body: bytes) -> ClientFrame:
    """Decode a frame sent by a client. Raises WireError."""
    try:
        return _client_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a client frame: {error}") from error


def decode_engine(body: bytes) -> EngineFrame:
    """Decode a frame sent by an engine. Raises WireError."""
    try:
        return _engine_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not an engine frame: {error}") from error


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids → little-endian int32 bytes. Raises OverflowError on an id that does not fit."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes | bytearray) -> list[int]:
    """Little-endian int32 bytes → token ids. Raises WireError when the length is not a multiple of 4."""
    if len(data) == 4:  # of a stream, nearly always
        return [*_TOKEN.unpack(data)]
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are not a sequence of int32 token ids")
    unpacked = array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
