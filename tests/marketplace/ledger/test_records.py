"""Journal records survive the journal."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.ledger.records import Checkpoint, Extend, Hold, JournalRecord, Settle, Void, decode, encode, with_seq
from marketplace.ledger.rules import OUTCOMES

number = st.integers(0, 2**62)
name = st.text(min_size=1, max_size=40)
records: st.SearchStrategy[JournalRecord] = st.one_of(
    st.builds(Hold, number, name, name, name, name, name, number, number, number, number, number, name),
    st.builds(Extend, number, name, number, number),
    st.builds(Checkpoint, number, name, number, number, number, number),
    st.builds(
        Settle,
        number,
        name,
        number,
        number,
        number,
        st.sampled_from(OUTCOMES),
        st.booleans(),
        name,
        st.sampled_from(["engine", "checkpoint", "recovered"]),
        name,
        number,
        number,
    ),
    st.builds(Void, number, name, name, number),
)


@given(records)
def test_encoded_and_back(record: JournalRecord) -> None:
    assert decode(encode(record)) == record


@given(records, number)
def test_numbering_changes_the_number_alone(record: JournalRecord, seq: int) -> None:
    again = with_seq(record, seq)
    assert again.seq == seq
    assert with_seq(again, record.seq) == record


@pytest.mark.parametrize(
    "body", [b"", b"\x80", msgspec.msgpack.encode({"type": "gift", "seq": 1}), encode(Void(1, "r", "x", 1))[:-1]]
)
def test_what_is_not_a_record(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(body)
