"""Chat completions through the official client: text, usage, money."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def test_an_answer_with_text_usage_and_headers(shared: Any) -> None:
    raw = shared.client().chat.completions.with_raw_response.create(model="tiny", messages=HELLO)
    answer = raw.parse()
    choice = answer.choices[0]
    assert choice.message.content.startswith("Hello, wörld! Hello, wörld! ")
    assert choice.message.role == "assistant" and choice.message.refusal is None
    assert choice.finish_reason == "stop" and choice.logprobs is None
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.completion_tokens == 32  # the end-of-sequence token counts: the engine made it
    assert usage.prompt_tokens == len("user\nHi\nassistant\n") + 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens_details.reasoning_tokens == 0
    headers = raw.headers
    assert answer._request_id == headers["x-request-id"]
    assert headers["x-request-id"].replace("-", "") in answer.id
    assert headers["openai-processing-ms"].isdigit() and headers["openai-version"]
    cost = usage.prompt_tokens * 20 + usage.completion_tokens * 60
    assert int(headers["x-cost-nanousd"]) == cost * 1_000_000 // 1_000_000
    assert headers["x-price-version"]
    assert shared.usage()[-1] == ("finished", 1, usage.prompt_tokens, 0, 32, cost, "completed")


def test_a_stream_adds_up_to_the_same_answer(shared: Any) -> None:
    client = shared.client()
    whole = client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
    with client.chat.completions.stream(model="tiny", messages=HELLO, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None and final.usage.completion_tokens == 32


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(shared: Any, stream: bool) -> None:
    client = shared.client()
    if stream:
        with client.chat.completions.stream(
            model="tiny", messages=HELLO, n=3, stream_options={"include_usage": True}
        ) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content.startswith("Hello, w") for choice in answer.choices)
    assert answer.usage.completion_tokens == 3 * 32
    assert answer.usage.prompt_tokens == len("user\nHi\nassistant\n") + 3
    assert shared.usage()[-1][4] == 96


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_are_left_out(shared: Any, stream: bool) -> None:
    client = shared.client()
    if stream:
        with client.chat.completions.stream(model="tiny", messages=HELLO, stop=["wör"]) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(model="tiny", messages=HELLO, stop="wör").choices[0]
    assert choice.message.content == "Hello, "
    assert choice.finish_reason == "stop"
    if not stream:
        assert choice.stop_reason == "wör"
    # "Hello, wör": ten characters, eleven bytes, eleven tokens; what came after them is not counted.
    assert shared.usage()[-1][4] == 11


def test_the_length_limit_has_two_names(shared: Any) -> None:
    client = shared.client()
    for name in ("max_tokens", "max_completion_tokens"):
        choice = client.chat.completions.create(model="tiny", messages=HELLO, **{name: 5}).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_every_token(shared: Any, stream: bool) -> None:
    client = shared.client()
    wanted: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    if stream:
        entries = [
            entry
            for chunk in client.chat.completions.create(stream=True, **wanted)
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content
        ]
    else:
        entries = client.chat.completions.create(**wanted).choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes) == "Hello, wö".encode()
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    assert all(math.isfinite(top.logprob) and isinstance(top.token, str) for e in entries for top in e.top_logprobs)


def test_metadata_comes_back_and_unknown_fields_are_named(shared: Any) -> None:
    raw = shared.client().chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, metadata={"team": "red"}, extra_body={"novelty": 1, "weird name\n": 2}
    )
    assert raw.parse().metadata == {"team": "red"}
    assert set(raw.headers["x-ignored-parameters"].split(",")) == {"novelty", "weird%20name%0A"}


def test_text_parts_and_the_developer_role_reach_the_template(shared: Any) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    answer = shared.client().chat.completions.create(model="tiny", messages=parts, max_tokens=1)
    assert answer.usage.prompt_tokens == len("system\na\nuser\nb\nc\nassistant\n") + 5


def test_errors_are_the_sdk_s_own_classes(shared: Any) -> None:
    client = shared.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-x", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.AuthenticationError) as wrong:
        shared.client(api_key="sk-wrong").chat.completions.create(model="tiny", messages=HELLO)
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 9000}])
    assert long.value.code == "context_length_exceeded"
    assert "8192" in long.value.message and str(9000 + len("user\n\nassistant\n") + 3) in long.value.message
    with pytest.raises(openai.BadRequestError) as both:
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8190)
    assert both.value.code == "context_length_exceeded"
    assert "8192" in both.value.message and "8190 in the completion" in both.value.message
