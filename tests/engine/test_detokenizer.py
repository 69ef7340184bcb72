from __future__ import annotations

import time
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer, StopMatcher
from engine.vocabulary import Vocabulary


@dataclass
class Tokens:
    """A tokenizer as far as the detokenizer knows one."""

    vocabulary: Vocabulary


def tokens(*entries: bytes | str, special: tuple[int, ...] = (), strips: bool = False) -> Tokens:
    table = [entry.encode() if isinstance(entry, str) else entry for entry in entries]
    return Tokens(Vocabulary(table, frozenset(special), strips))


BYTES = tokens(*[bytes([value]) for value in range(256)], "<end>", special=(256,))
# Few letters, so that stop strings and their beginnings turn up all the time
PIECES: list[bytes | str] = [
    "a",
    "b",
    "ab",
    "ba",
    "aab",
    " ",
    "é".encode()[:1],
    "é".encode()[1:],
    "😀".encode()[:3],
    "😀".encode()[3:],
    "é",
]
SMALL = tokens(*PIECES, "<end>", special=(len(PIECES),))
ids = st.lists(st.integers(0, len(PIECES)), max_size=40)
stops = st.lists(st.text("abé 😀", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, candidates: list[str]) -> tuple[int, str] | None:
    """The definition: the stop string that is completed first, the longest where several are; (its end, it)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in candidates if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def run(chunks: list[list[int]], stop: list[str], include: bool) -> tuple[str, str | None, int]:
    detokenizer = Detokenizer(SMALL, stop, include)
    text = "".join([detokenizer.push(chunk) for chunk in chunks])
    return text + detokenizer.finish(), detokenizer.stopped, detokenizer.consumed


@given(ids=ids, stop=stops, include=st.booleans(), data=st.data())
def test_any_chunking_gives_the_text_of_decoding_at_once(
    ids: list[int], stop: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]
    whole = b"".join(SMALL.vocabulary.plain_bytes[index] for index in ids).decode("utf-8", "replace")
    found = first_stop(whole, stop)
    text, stopped, consumed = run(chunks, stop, include)
    if found is None:
        assert (text, stopped, consumed) == (whole, None, len(ids))
        return
    end, name = found
    assert (text, stopped) == (whole[: end if include else end - len(name)], name)
    # The shortest run of tokens whose text has the whole stop string; a broken character may only show at the end
    assert run([ids[:consumed]], stop, include) == (text, stopped, consumed)
    before = Detokenizer(SMALL, stop, include)
    before.push(ids[: consumed - 1])
    assert before.stopped is None


@given(ids=ids, stop=stops)
def test_all_that_is_certain_is_said_and_nothing_more(ids: list[int], stop: list[str]) -> None:
    detokenizer, free = Detokenizer(SMALL, stop), Detokenizer(SMALL)
    final, _, _ = run([ids], stop, False)
    said = whole = ""
    for index in ids:
        said += detokenizer.push([index])
        whole += free.push([index])
        assert final.startswith(said)
        if detokenizer.stopped is not None:
            break
        beginnings = [entry[:size] for entry in stop for size in range(1, len(entry)) if whole.endswith(entry[:size])]
        held = max(map(len, beginnings), default=0)
        assert said == whole[: len(whole) - held]


@given(st.text())
def test_every_text_survives_byte_by_byte(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push([value]) for value in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text
    assert "�" not in "".join(pieces) or "�" in text


def test_half_a_character_waits() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push([value]) for value in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert detokenizer.push(list("😀".encode()[:2])) == ""
    assert detokenizer.finish() == "�"


def test_the_beginning_of_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(BYTES, ["END", "ENOUGH"])
    assert detokenizer.push(list(b"the EN")) == "the "
    assert detokenizer.push(list(b"EN")) == "EN"
    assert detokenizer.push(list(b"D")) == ""
    assert (detokenizer.stopped, detokenizer.consumed) == ("END", 9)
    assert detokenizer.push(list(b"more")) == "" and detokenizer.finish() == ""
    assert detokenizer.consumed == 9


def test_a_held_beginning_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, ["END"])
    assert detokenizer.push(list(b"the EN")) + "|" + detokenizer.finish() == "the |EN"
    assert detokenizer.stopped is None


def test_a_stop_string_inside_one_token() -> None:
    tokenizer = tokens("one STOP two", "x")
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    assert (detokenizer.push([0, 1]), detokenizer.consumed) == ("one ", 1)
    detokenizer = Detokenizer(tokenizer, ["STOP"], include_stop=True)
    assert (detokenizer.push([0, 1]), detokenizer.stopped) == ("one STOP", "STOP")


def test_special_tokens_are_text_only_when_asked() -> None:
    sequence = [*b"hi", 256]
    assert Detokenizer(BYTES).push(sequence) == "hi"
    assert Detokenizer(BYTES, skip_special=False).push(sequence) == "hi<end>"
    detokenizer = Detokenizer(BYTES, ["<end>"], skip_special=False)
    assert (detokenizer.push(sequence), detokenizer.stopped) == ("hi", "<end>")


def test_sentencepiece_loses_the_space_that_encoding_added() -> None:
    tokenizer = tokens(" the", " cat", strips=True)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([0]) + detokenizer.push([1]) == "the cat"


def test_empty_stop_strings_are_ignored() -> None:
    detokenizer = Detokenizer(BYTES, ["", ""])
    assert detokenizer.push(list(b"text")) == "text"
    assert detokenizer.stopped is None


@given(text=st.text("ab", max_size=60), stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_matcher_holds_exactly_the_longest_beginning(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    if matcher.feed(text) is None:
        beginnings = [entry[:size] for entry in stop for size in range(len(entry))]
        assert matcher.held == max(len(start) for start in beginnings if text.endswith(start))
    else:
        assert first_stop(text, stop) is not None


def test_a_token_costs_microseconds() -> None:
    sequence = list(b"some ordinary English text without anything special in it. " * 40)
    best = min(_seconds(sequence) for _ in range(5))
    assert best / len(sequence) < 10e-6


def _seconds(sequence: list[int]) -> float:
    detokenizer = Detokenizer(BYTES, ["\n\nUser:", "###", "</answer>", "sometimes"])
    started = time.perf_counter()
    for index in sequence:
        detokenizer.push([index])
    return time.perf_counter() - started
