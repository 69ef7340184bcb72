"""An answer's text, tokens and counters are the same however its tokens arrive and however often it is read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.answer import Answer, Delta
from engine.detokenizer import Detokenizer
from engine.sampling_params import SamplingParams
from engine.vocabulary import Vocabulary
from engine.wire import Counters, FinishReason, Progress, TokenLogprobs, pack_tokens


class ByteTokenizer:
    """Fake: a token is a byte; 0 is special."""

    vocabulary = Vocabulary([bytes([i]) for i in range(256)], frozenset({0}), False)


def answer(**params: object) -> Answer:
    asked = SamplingParams(**params)  # type: ignore[arg-type]
    text = Detokenizer(ByteTokenizer(), asked.stop, asked.include_stop, asked.skip_special_tokens)
    return Answer(0, "r", asked, text)


def said(
    ids: bytes | list[int],
    completion: int,
    finish: FinishReason | None = None,
    stop_token: int | None = None,
    logprobs: bool = False,
) -> Progress:
    return Progress(
        request_id="r",
        tokens=pack_tokens(list(ids)),
        logprobs=[TokenLogprobs(-float(i), []) for i in ids] if logprobs else None,
        counters=Counters(prompt=4, cached=1, completion=completion, started=True),
        finish_reason=finish,
        stop_token=stop_token,
    )


def joined(deltas: list[Delta]) -> tuple[str, list[int], list[float]]:
    text = "".join(d.text for d in deltas)
    ids = [i for d in deltas for i in d.token_ids]
    return text, ids, [p.logprob for d in deltas for p in d.logprobs or []]


@given(
    text=st.text(st.sampled_from("abc€é "), max_size=30),
    stop=st.lists(st.text(st.sampled_from("abc€é "), min_size=1, max_size=4), max_size=2),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    reads=st.lists(st.booleans(), min_size=1, max_size=40),
    include=st.booleans(),
    overshoot=st.integers(0, 3),
)
def test_any_split_and_any_reading_gives_the_same_answer(
    text: str, stop: list[str], cuts: list[int], reads: list[bool], include: bool, overshoot: int
) -> None:
    raw = list(text.encode())
    ends = [(at + len(s), -len(s)) for s in stop if (at := text.find(s)) >= 0]
    end = min(ends)[0] if ends else len(text)
    longest = -min(ends)[1] if ends else 0
    shown = text[:end] if include or not ends else text[: end - longest]
    counted = len(text[:end].encode())

    one = answer(stop=tuple(stop), include_stop=include)
    deltas: list[Delta] = []
    at, step, finished = 0, 0, False
    while not finished:
        size = cuts[step % len(cuts)]
        part, at = raw[at : at + size], min(len(raw), at + size)
        over = at == len(raw)
        finished = one.take(said(part, at, "length" if over else None, logprobs=True))
        if reads[step % len(reads)] and (delta := one.read()) is not None:
            deltas.append(delta)
        step += 1
    last = one.read()
    deltas += [last] if last is not None else []
    assert joined(deltas) == (shown, raw[:counted], [-float(i) for i in raw[:counted]])
    assert [d.finish_reason for d in deltas if d.finish_reason is not None] == ["stop" if ends else "length"]
    assert deltas[-1].finish_reason is not None
    assert one.counters.completion == counted
    assert not one.unread


def test_half_a_character_waits_for_its_other_half() -> None:
    one = answer()
    one.take(said("€".encode()[:2], 2))
    assert one.unread
    assert one.read() is None
    one.take(said("€".encode()[2:], 3))
    assert one.read() == Delta(0, "€", list("€".encode()))


def test_what_may_become_a_stop_string_is_held_back_and_released_at_the_end() -> None:
    one = answer(stop=("END",))
    one.take(said(b"abEN", 4))
    assert one.read() == Delta(0, "ab", list(b"abEN"))
    assert one.take(said(b"", 4, "length"))
    assert one.read() == Delta(0, "EN", [], finish_reason="length")


def test_a_stop_string_ends_the_answer_before_the_engine_does() -> None:
    one = answer(stop=("END",))
    assert one.take(said(b"abENDxyz", 8))
    assert one.read() == Delta(0, "ab", list(b"abEND"), finish_reason="stop", stop_reason="END")
    assert one.counters == Counters(prompt=4, cached=1, completion=5, started=True)


def test_a_stop_string_wins_over_an_end_in_the_same_progress() -> None:
    one = answer(stop=("END",))
    assert one.take(said([*b"abEND", 0], 6, "stop", stop_token=0, logprobs=True))
    delta = one.read()
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason, delta.token_ids) == (
        "ab",
        "stop",
        "END",
        list(b"abEND"),
    )
    assert delta.logprobs is not None
    assert len(delta.logprobs) == 5
    assert one.counters.completion == 5


def test_the_token_that_ends_an_answer_is_counted_and_not_shown() -> None:
    eos = answer()
    eos.take(said([*b"ab", 0], 3, "stop", stop_token=0, logprobs=True))
    delta = eos.read()
    assert delta == Delta(0, "ab", list(b"ab"), [TokenLogprobs(-97.0, []), TokenLogprobs(-98.0, [])], "stop", None)
    assert eos.counters.completion == 3
    asked = answer(stop_token_ids=(98,))
    asked.take(said(b"ab", 2, "stop", stop_token=98))
    assert asked.read() == Delta(0, "a", [97], finish_reason="stop", stop_reason=98)


def test_special_tokens_have_no_text_unless_asked_for() -> None:
    hidden, shown = answer(), answer(skip_special_tokens=False)
    for one in (hidden, shown):
        one.take(said([97, 0, 98], 3, "length"))
    deltas = [hidden.read(), shown.read()]
    assert [d.text for d in deltas if d] == ["ab", "a\0b"]
    assert [d.token_ids for d in deltas if d] == [[97, 0, 98]] * 2


def test_an_unread_answer_is_one_delta() -> None:
    one = answer(logprobs=0)
    for count in range(1, 1001):
        one.take(said(b"x", count, logprobs=True))
    delta = one.read()
    assert delta is not None
    assert (delta.text, len(delta.token_ids)) == ("x" * 1000, 1000)
    assert delta.logprobs is not None
    assert len(delta.logprobs) == 1000
    assert one.read() is None
