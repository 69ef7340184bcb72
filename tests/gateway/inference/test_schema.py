"""Every field of the chat format: accepted where it acts or asks for nothing, refused by name everywhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.errors import ApiError
from gateway.inference.sampling import MAX_N, check_vocabulary, sampling_params
from gateway.inference.schema import ChatRequest, parse_chat, template_messages

HELLO = [{"role": "user", "content": "Hello"}]


def parse(**fields: Any) -> tuple[ChatRequest, tuple[str, ...]]:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request, _ = parse(**fields)
        template_messages(request)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


NO_OPS: list[dict[str, Any]] = [
    {"tools": []},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"parallel_tool_calls": True},
    {"parallel_tool_calls": False},
    {"functions": []},
    {"function_call": "auto"},
    {"response_format": {"type": "text"}},
    {"reasoning_effort": "none"},
    {"verbosity": "medium"},
    {"modalities": ["text"]},
    {"store": False},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"metadata": {"a": "b"}},
    {"user": "u"},
    {"safety_identifier": "s"},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "in_memory"},
    {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
    {"logit_bias": {}},
    {"stop": []},
    {"guided_json": None},
    {"chat_template": None},
    {"bad_words": []},
    {"length_penalty": 1.0},
    {"length_penalty": 1},
    {"use_beam_search": False},
    {"add_generation_prompt": True},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"seed": -(2**63)},
    {"n": 1, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "logprobs": False},
]


@pytest.mark.parametrize("fields", NO_OPS, ids=",".join)
def test_values_that_act_or_ask_for_nothing_pass(fields: dict[str, Any]) -> None:
    request, ignored = parse(**fields)
    assert request.model == "m"
    assert ignored == ()


def test_every_field_may_be_null() -> None:
    optional = [f for f in ChatRequest.__struct_fields__ if f not in ("model", "messages")]
    request, ignored = parse(**dict.fromkeys(optional))
    assert ignored == ()
    assert all(getattr(request, name) is None for name in optional)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [TOOL]}),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("verbosity", {"verbosity": "low"}),
    ("prediction", {"prediction": {"type": "content", "content": "x"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("audio", {"audio": {"voice": "alloy", "format": "mp3"}}),
    ("moderation", {"moderation": {"model": "m"}}),
    ("web_search_options", {"web_search_options": {}}),
    ("store", {"store": True}),
    ("service_tier", {"service_tier": "priority"}),
    ("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
    ("prompt_cache_options", {"prompt_cache_options": {"mode": "explicit"}}),
    ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ("stream_options.continuous_usage_stats", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
    ("structured_outputs", {"structured_outputs": {"json": {}}}),
    ("guided_json", {"guided_json": {"type": "object"}}),
    ("guided_regex", {"guided_regex": "a*"}),
    ("guided_choice", {"guided_choice": ["a"]}),
    ("guided_grammar", {"guided_grammar": "root ::= 'a'"}),
    ("bad_words", {"bad_words": ["x"]}),
    ("allowed_token_ids", {"allowed_token_ids": [1]}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("add_generation_prompt", {"add_generation_prompt": False}),
    ("continue_final_message", {"continue_final_message": True}),
    ("use_beam_search", {"use_beam_search": True}),
    ("length_penalty", {"length_penalty": 0.5}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("priority", {"priority": 0}),
    ("request_id", {"request_id": "x"}),
    ("cache_salt", {"cache_salt": "x"}),
    ("kv_transfer_params", {"kv_transfer_params": {}}),
    ("vllm_xargs", {"vllm_xargs": {}}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}),
    ("messages[0].role", {"messages": [{"role": "function", "content": "x", "name": "f"}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}),
    ("messages[0].function_call", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
    ("messages[0].audio", {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}),
    (
        "messages[1].content[1].type",
        {
            "messages": [
                *HELLO,
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
                },
            ]
        },
    ),
    (
        "messages[0].content[0].type",
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
            ]
        },
    ),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
    ),
    (
        "messages[0].content[0].prompt_cache_breakpoint",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}],
                }
            ]
        },
    ),
]


@pytest.mark.parametrize(("param", "fields"), UNSUPPORTED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_act_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    error = refused(**fields)
    assert error.code == "unsupported_parameter"
    assert error.param == param
    assert f"'{param}'" in error.message


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 2.01}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("frequency_penalty", {"frequency_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": -2.5}),
    ("n", {"n": 0}),
    ("n", {"n": MAX_N + 1}),
    ("n", {"n": 128}),
    ("n", {"n": True}),
    ("n", {"n": 1.5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("max_completion_tokens", {"max_completion_tokens": 2**31}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": False, "top_logprobs": 2}),
    ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
    ("stop", {"stop": ""}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop", {"stop": 5}),
    ("stop[0]", {"stop": [5]}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": "x"}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": "yes"}}),
    ("logit_bias.abc", {"logit_bias": {"abc": 1}}),
    ("logit_bias.-1", {"logit_bias": {"-1": 1}}),
    ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"5": "x"}}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("min_tokens", {"min_tokens": -1}),
    ("metadata", {"metadata": {str(i): "x" for i in range(17)}}),
    ("metadata", {"metadata": {"a": "x" * 513}}),
    ("metadata." + "k" * 64, {"metadata": {"k" * 65: "x"}}),
    ("safety_identifier", {"safety_identifier": "s" * 65}),
    ("service_tier", {"service_tier": "gold"}),
    ("reasoning_effort", {"reasoning_effort": "extreme"}),
    ("verbosity", {"verbosity": "loud"}),
    ("tools[0].type", {"tools": [{"type": "thing"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tool_choice", {"tool_choice": "sometimes"}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("modalities[0]", {"modalities": ["smell"]}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[3].content", {"messages": [*HELLO, *HELLO, *HELLO, {"role": "user", "content": 7}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    ("model", {"model": ""}),
    ("model", {"model": 5}),
]


@pytest.mark.parametrize(("param", "fields"), INVALID, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_types_and_ranges_name_the_dotted_path(param: str, fields: dict[str, Any]) -> None:
    error = refused(**fields)
    assert error.code == "invalid_value"
    assert error.param == param


MISSING: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"model": "m"}),
    ("model", {"messages": HELLO}),
    ("messages[0].content", {"model": "m", "messages": [{"role": "user"}]}),
    ("messages[0].content", {"model": "m", "messages": [{"role": "assistant"}]}),
    ("messages[0].role", {"model": "m", "messages": [{"content": "x"}]}),
    ("messages[0].tool_call_id", {"model": "m", "messages": [{"role": "tool", "content": "x"}]}),
    ("tools[0].function.name", {"model": "m", "messages": HELLO, "tools": [{"type": "function", "function": {}}]}),
]


@pytest.mark.parametrize(("param", "body"), MISSING, ids=lambda v: v if isinstance(v, str) else "")
def test_missing_fields_are_named(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        request, _ = parse_chat(json.dumps(body).encode())
        template_messages(request)
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": "m",}',
        b'{"model": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]} trailing',
        b'{"model": "\xff"}',
        b'{"model": "m", "tool_choice": {"a": ' + b"[" * 20_000,
        b'{"unknown": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800 lone"}], "model": "m"}',
    ],
    ids=lambda b: repr(b[:20]),
)
def test_malformed_bodies_are_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"model": NaN}', "invalid character (byte 10)"),
        (b"", "input data was truncated"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"unknown": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested too deeply"),
    ],
    ids=["character", "empty", "encoding", "depth"],
)
def test_a_malformed_body_is_told_why(body: bytes, why: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.message == f"The body is not valid JSON: {why}."


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"null"])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.code == "invalid_value"
    assert "expected object" in caught.value.message


def test_unknown_fields_are_accepted_and_reported_with_their_path() -> None:
    request, ignored = parse(
        messages=[{"role": "user", "content": "x", "mood": "good"}], novelty=1, stream=True, stream_options={"later": 1}
    )
    assert set(ignored) == {"novelty", "messages[0].mood", "stream_options.later"}
    assert template_messages(request) == [{"role": "user", "content": "x"}]


def test_an_unknown_field_hides_no_other_mistake() -> None:
    assert refused(novelty=1, temperature=5).param == "temperature"
    assert refused(novelty=1, priority=5).param == "priority"


@pytest.mark.parametrize("name", ["", "`", "a` - at `$.messages", "x` - at `$.messages[9].y", "a.b", "$"])
def test_any_name_of_an_unknown_field_is_survived(name: str) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, name: 1}).encode()
    try:
        _, ignored = parse_chat(body)
        assert ignored == (name,)
    except ApiError as error:
        assert error.code == "unknown_parameter"


def test_too_many_unknown_fields_are_refused() -> None:
    assert refused(**{f"x{i}": i for i in range(17)}).code == "unknown_parameter"


def test_roles_and_parts_become_template_messages() -> None:
    request, _ = parse(
        messages=[
            {"role": "developer", "content": "Be brief.", "name": "dev"},
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": "Yes.", "reasoning": "because", "annotations": [], "tool_calls": []},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        ]
    )
    assert template_messages(request) == [
        {"role": "system", "content": "Be brief.", "name": "dev"},
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "because"},
        {"role": "assistant", "content": "Never."},
    ]


def test_sampling_fields_reach_the_engine() -> None:
    request, _ = parse(
        temperature=0.5,
        top_p=0,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=1,
        presence_penalty=-1,
        logit_bias={"7": -100},
        seed=11,
        stop="END",
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    params = sampling_params(request, 64, 5, {})
    params.verify(vocab_size=8)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 1e-9, 0, 0.1)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.2, 1, -1)
    assert (params.logit_bias, params.seed, params.stop, params.stop_token_ids) == ({7: -100}, 11, ("END",), (3,))
    assert (params.min_tokens, params.max_tokens, params.logprobs) == (2, 64, 5)
    assert params.ignore_eos and params.include_stop and not params.skip_special_tokens


def test_a_recommendation_holds_where_the_request_does_not_say() -> None:
    recommended = {"temperature": 0.2, "top_p": 0.9, "top_k": 50}
    silent, _ = parse()
    params = sampling_params(silent, 64, None, recommended)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 50)
    said, _ = parse(temperature=0, top_p=1.0)
    params = sampling_params(said, 64, None, recommended)
    assert (params.temperature, params.top_p, params.top_k) == (0, 1.0, 50)


def test_token_ids_must_exist_in_the_model() -> None:
    request, _ = parse(logit_bias={"8": 1})
    with pytest.raises(ApiError, match="vocabulary of 8"):
        check_vocabulary(request, 8)
    check_vocabulary(request, 9)
    request, _ = parse(stop_token_ids=[9])
    with pytest.raises(ApiError) as caught:
        check_vocabulary(request, 9)
    assert caught.value.param == "stop_token_ids"


def test_min_tokens_above_the_limit_is_refused() -> None:
    request, _ = parse(min_tokens=10)
    with pytest.raises(ApiError) as caught:
        sampling_params(request, 9, None, {})
    assert caught.value.param == "min_tokens"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__), JSON, max_size=6))
def test_any_json_is_parsed_or_refused_and_never_crashes(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    try:
        request, _ = parse_chat(body)
        template_messages(request)
        sampling_params(request, request.asked_max_tokens or 2**31, None, {}).verify()
        accepted = True
    except ApiError as error:
        accepted = False
        assert error.status == 400 and error.message
    assert accepted in (True, False)
