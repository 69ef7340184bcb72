"""Framing survives any split of the stream, refuses junk, and every frame means the same on both sides."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from engine.sampling_params import SamplingParams

ids = st.text(min_size=1, max_size=40)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50).map(wire.pack_tokens)
counts = st.integers(0, 2**40)
counters = st.builds(wire.Counters, prompt=counts, cached=counts, completion=counts, started=st.booleans())
finish = st.sampled_from([None, "stop", "length", "abort", "error"])
number = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.builds(
    wire.TokenLogprobs, logprob=number, top=st.lists(st.tuples(st.integers(0, 2**31 - 1), number), max_size=5)
)
progress = st.builds(
    wire.Progress,
    request_id=ids,
    tokens=tokens,
    logprobs=st.none() | st.lists(logprobs, max_size=3),
    counters=counters,
    finish_reason=finish,
    stop_token=st.none() | st.integers(0, 2**31 - 1),
    error=st.none() | st.text(max_size=30),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 4096),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=4).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 50_000), st.floats(-100, 100), max_size=4),
)
client_frames = st.one_of(
    st.builds(
        wire.Submit, request_id=ids, prompt=tokens, params=params, priority=st.integers(-9, 9), salt=st.text(max_size=9)
    ),
    st.builds(wire.Abort, request_id=ids),
    st.builds(wire.UsageQuery, query_id=counts, request_ids=st.lists(ids, max_size=5)),
    st.builds(wire.SnapshotQuery, query_id=counts),
)
engine_frames = st.one_of(
    st.builds(wire.Step, progress=st.lists(progress, max_size=4)),
    st.builds(
        wire.Refused,
        request_id=ids,
        code=st.sampled_from(["queue_full", "overloaded", "too_long", "invalid", "draining"]),
        message=st.text(max_size=30),
        retry_after_s=st.floats(0, 1e6),
    ),
    st.builds(
        wire.UsageReply,
        query_id=counts,
        epoch=ids,
        known=st.dictionaries(ids, st.builds(wire.Usage, counters=counters, finish_reason=finish), max_size=3),
    ),
    st.builds(
        wire.Welcome,
        protocol=counts,
        epoch=ids,
        model=ids,
        max_context=counts,
        vocab_size=counts,
        kv_tokens=counts,
        pid=counts,
    ),
)


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(frames=st.lists(client_frames, max_size=6), cuts=st.lists(st.integers(0, 5000), max_size=12))
def test_client_frames_round_trip_under_any_split(frames: list[wire.ClientFrame], cuts: list[int]) -> None:
    reader = wire.FrameReader()
    received = [
        wire.decode_client(body)
        for part in split(b"".join(map(wire.encode, frames)), cuts)
        for body in reader.feed(part)
    ]
    assert received == frames
    assert reader.pending == 0


@given(frames=st.lists(engine_frames, max_size=6), cuts=st.lists(st.integers(0, 5000), max_size=12))
def test_engine_frames_round_trip_under_any_split(frames: list[wire.EngineFrame], cuts: list[int]) -> None:
    reader = wire.FrameReader()
    received = [
        wire.decode_engine(body)
        for part in split(b"".join(map(wire.encode, frames)), cuts)
        for body in reader.feed(part)
    ]
    assert received == frames
    assert reader.pending == 0


@given(frame=engine_frames)
def test_one_byte_at_a_time_yields_the_frame_with_its_last_byte(frame: wire.EngineFrame) -> None:
    reader = wire.FrameReader()
    stream = wire.encode(frame)
    early = [body for i in range(len(stream) - 1) for body in reader.feed(stream[i : i + 1])]
    assert early == []
    assert reader.pending == len(stream) - 1
    assert [wire.decode_engine(body) for body in reader.feed(stream[-1:])] == [frame]


@given(junk=st.binary(max_size=200))
def test_junk_is_a_wire_error_or_a_frame_never_another_exception(junk: bytes) -> None:
    outcomes = []
    for decode in (wire.decode_client, wire.decode_engine):
        try:
            outcomes.append(isinstance(decode(junk), wire.ClientFrame | wire.EngineFrame))
        except wire.WireError:
            outcomes.append(True)
    assert outcomes == [True, True]


@pytest.mark.parametrize("cut", [4, 6, 9])
def test_an_oversized_frame_is_refused_from_its_length_alone(cut: int) -> None:
    stream = struct.pack("<I", wire.MAX_FRAME + 1) + b"xxxxx"
    reader = wire.FrameReader()
    with pytest.raises(wire.WireError, match="over the limit"):
        for part in (stream[: cut - 3], stream[cut - 3 : cut], stream[cut:]):
            reader.feed(part)


def test_a_large_frame_arrives_whole_from_many_parts() -> None:
    submit = wire.Submit(request_id="r", prompt=bytes(8 << 20), params=SamplingParams())
    stream = wire.encode(submit)
    reader = wire.FrameReader()
    bodies = [body for at in range(0, len(stream), 65536) for body in reader.feed(stream[at : at + 65536])]
    assert [wire.decode_client(body) for body in bodies] == [submit]


def test_a_frame_of_the_other_direction_is_refused() -> None:
    with pytest.raises(wire.WireError, match="not an engine frame"):
        wire.decode_engine(wire.encode(wire.Abort("r"))[4:])
    with pytest.raises(wire.WireError, match="not a client frame"):
        wire.decode_client(wire.encode(wire.Step([]))[4:])


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_round_trip(values: list[int]) -> None:
    packed = wire.pack_tokens(values)
    assert packed == struct.pack(f"<{len(values)}i", *values)
    assert wire.unpack_tokens(packed) == values
    assert wire.unpack_tokens(bytearray(packed)) == values


def test_ragged_tokens_are_a_wire_error() -> None:
    with pytest.raises(wire.WireError, match="5 bytes"):
        wire.unpack_tokens(b"12345")
