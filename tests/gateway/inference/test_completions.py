"""Text completions: every form of prompt, echo, logprobs, several choices, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.completions import CompletionAsk, CompletionRequest, parse_completion
from gateway.inference.errors import ApiError

TEXT = "Hello, wörld! "


def test_a_text_prompt_and_the_default_length(shared: Any) -> None:
    raw = shared.client().completions.with_raw_response.create(model="tiny", prompt="Once")
    answer = raw.parse()
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello, wörld! H"  # 16 tokens, one per byte
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 16
    assert int(raw.headers["x-cost-nanousd"]) == 4 * 20 + 16 * 60


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab", [2]), (["ab", "c", "def"], [2, 1, 3]), ([65, 66, 67], [3]), ([[65], [66, 67]], [1, 2])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_prompt(shared: Any, prompt: Any, tokens: list[int], stream: bool) -> None:
    before = len(shared.usage())
    client = shared.client()
    wanted: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "n": 2}
    texts: dict[int, str] = {}
    if stream:
        for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **wanted):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
            usage = chunk.usage
    else:
        answer = client.completions.create(**wanted)
        texts = {choice.index: choice.text for choice in answer.choices}
        usage = answer.usage
    assert texts == dict.fromkeys(range(2 * len(tokens)), "Hello")
    assert usage is not None
    assert usage.prompt_tokens == sum(tokens) and usage.completion_tokens == 10 * len(tokens)
    # Each prompt is metered by itself.
    assert [row[2] for row in shared.usage()[before:]] == tokens or sorted(
        row[2] for row in shared.usage()[before:]
    ) == sorted(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(shared: Any, stream: bool) -> None:
    client = shared.client()
    wanted: dict[str, Any] = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 5, "echo": True}
    if stream:
        texts: dict[int, str] = {}
        for chunk in client.completions.create(stream=True, **wanted):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    else:
        texts = {choice.index: choice.text for choice in client.completions.create(**wanted).choices}
    assert texts == {0: "abHello", 1: "cdHello"}
    ids = client.completions.create(model="tiny", prompt=[66, 65], max_tokens=1, echo=True).choices[0].text
    assert ids.endswith("H") and len(ids) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_parallel_lists(shared: Any, stream: bool) -> None:
    client = shared.client()
    wanted: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 6, "logprobs": 2}
    if stream:
        parts = [
            choice.logprobs
            for chunk in client.completions.create(stream=True, **wanted)
            for choice in chunk.choices
            if choice.logprobs is not None
        ]
    else:
        parts = [client.completions.create(**wanted).choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == list("Hello,")
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 2, 3, 4, 5]
    assert all(value <= 0 for part in parts for value in part.token_logprobs)
    assert all(1 <= len(top) <= 3 for part in parts for top in part.top_logprobs)


def test_logprobs_zero_gives_the_chosen_alone(shared: Any) -> None:
    logprobs = (
        shared.client().completions.create(model="tiny", prompt="ab", max_tokens=2, logprobs=0).choices[0].logprobs
    )
    assert logprobs.top_logprobs is None and len(logprobs.token_logprobs) == 2


def test_money_is_held_for_all_prompts_or_none(make_house: Any) -> None:
    house = make_house(first_balance="0.000002")  # 2,000 nano-units: one prompt of ten tokens and 16 answers is 1,160
    with pytest.raises(openai.RateLimitError):
        house.client().completions.create(model="tiny", prompt=["a" * 10, "b" * 10])
    house.idle()
    assert house.rows("SELECT state, count(*) FROM hold GROUP BY state") == [("voided", 1)]
    assert house.client().completions.create(model="tiny", prompt="a" * 10).choices


def test_one_failing_prompt_ends_the_others_free_of_charge(make_house: Any) -> None:
    house = make_house({"tokens": 50, "interval_ms": 5.0, "fail_token": 20})
    with pytest.raises(openai.InternalServerError):
        house.client().completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=50)
    assert {(row[1], row[5]) for row in house.usage()} == {(0, 0)}


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("missing_required_parameter", "prompt", {"prompt": ...}),
    ("invalid_value", "prompt", {"prompt": None}),
    ("invalid_value", "prompt", {"prompt": []}),
    ("invalid_value", "prompt", {"prompt": 5}),
    ("invalid_value", "prompt", {"prompt": ["a", 5]}),
    ("invalid_value", "prompt", {"prompt": [5, [6]]}),
    ("invalid_value", "prompt[0]", {"prompt": [-1]}),
    ("invalid_value", "prompt", {"prompt": ["x"] * 65, "n": 2}),
    ("invalid_value", "best_of", {"best_of": 1, "n": 2}),
    ("unsupported_parameter", "best_of", {"best_of": 3, "n": 2}),
    ("invalid_value", "best_of", {"best_of": 21}),
    ("unsupported_parameter", "suffix", {"suffix": "end"}),
    ("invalid_value", "logprobs", {"logprobs": 6}),
    ("invalid_value", "logprobs", {"logprobs": True}),
    ("unsupported_parameter", "echo", {"echo": True, "logprobs": 1}),
    ("invalid_value", "max_tokens", {"max_tokens": 0}),
    ("invalid_value", "temperature", {"temperature": 9}),
    ("unsupported_parameter", "guided_json", {"guided_json": {}}),
]


@pytest.mark.parametrize(("code", "param", "fields"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named(code: str, param: str, fields: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": "x", **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    with pytest.raises(ApiError) as caught:
        CompletionAsk(json.dumps(body).encode())
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("prompt", "param"), [("", "prompt"), (["a", ""], "prompt[1]"), ([[65], []], "prompt[1]"), ([258], "prompt")]
)
def test_empty_and_unknown_tokens_are_refused(shared: Any, prompt: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        shared.client().completions.create(model="tiny", prompt=prompt)
    assert caught.value.param == param


def test_a_prompt_that_fills_the_context(shared: Any) -> None:
    client = shared.client()
    answer = client.completions.create(model="tiny", prompt="x" * 8190)
    assert answer.usage.completion_tokens == 2  # what is left is less than the default
    for length, limit in ((8192, None), (8000, 193)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * length, max_tokens=limit or openai.omit)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        assert "8192" in caught.value.message and str(length) in caught.value.message


def test_best_of_equal_to_n_and_an_empty_suffix_ask_for_nothing() -> None:
    request, ignored = parse_completion(b'{"model":"m","prompt":"x","best_of":2,"n":2,"suffix":"","x":1}')
    assert request.best_of == 2 and ignored == ("x",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(CompletionRequest.__struct_fields__), JSON, max_size=5))
def test_any_json_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    try:
        ask = CompletionAsk(json.dumps({"model": "m", "prompt": "x", **fields}).encode())
        assert ask.request.model
    except ApiError as error:
        assert error.status == 400
