"""`POST /v1/embeddings`: every form of input through the real client, what it costs, and what is refused."""

from __future__ import annotations

import base64
import json
import math
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from engine.config import EngineConfig
from gateway.inference.embeddings import EmbeddingAsk, shortened
from gateway.inference.errors import ApiError

SIZE = 8


@pytest.fixture(scope="module")
def vectors(house_maker: Any) -> Iterator[Any]:
    """A gateway in front of an embedding model with a context of 64 tokens, whose engine takes 24 texts at a time."""
    script = {"dimensions": SIZE, "max_context": 65, "max_running": 16, "max_queued": 8}
    house = house_maker(script, engine=EngineConfig(max_running=16, max_queued=8))
    yield house
    house.close()


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("ab", [2]), (["ab", "c", "def"], [2, 1, 3]), ([65, 66, 67], [3]), ([[65], [66, 67]], [1, 2])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_input(vectors: Any, given: Any, tokens: list[int]) -> None:
    before = len(vectors.usage())
    raw = vectors.client().embeddings.with_raw_response.create(model="tiny", input=given, user="u-1")
    answer = raw.parse()
    assert (answer.object, answer.model) == ("list", "tiny")
    assert [(item.object, item.index) for item in answer.data] == [("embedding", i) for i in range(len(tokens))]
    for item in answer.data:
        assert len(item.embedding) == SIZE and math.hypot(*item.embedding) == pytest.approx(1, abs=1e-6)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (sum(tokens), sum(tokens))
    assert int(raw.headers["x-cost-nanousd"]) == 20 * sum(tokens)
    rows = vectors.usage()[before:]
    assert sorted(row[2] for row in rows) == sorted(tokens), "each input is metered by itself"


def test_equal_texts_have_equal_vectors_in_every_format(vectors: Any) -> None:
    client = vectors.client()
    plain = client.embeddings.create(model="tiny", input=["one", "two", "one"], encoding_format="float")
    first, second, third = (item.embedding for item in plain.data)
    assert first == third != second
    raw = client.embeddings.with_raw_response.create(model="tiny", input="one", encoding_format="base64")
    coded = json.loads(raw.text)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), dtype="<f4").tolist() == first
    short = client.embeddings.create(model="tiny", input="one", dimensions=3).data[0].embedding
    assert math.hypot(*short) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(short, np.array(first[:3]) / np.linalg.norm(first[:3]), atol=1e-6)
    assert client.embeddings.create(model="tiny", input="one", dimensions=SIZE).data[0].embedding == first


def test_as_many_inputs_as_there_may_be(vectors: Any) -> None:
    """More than the engine takes at a time: the rest waits here, and nothing is refused."""
    texts = [[1 + i % 250, 1 + i // 250] for i in range(2048)]
    answer = vectors.client().embeddings.create(model="tiny", input=texts)
    assert answer.usage.prompt_tokens == 4096
    assert len({tuple(item.embedding) for item in answer.data}) > 1000
    vectors.idle()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": [[65], []]}, "invalid_value", "input[1]"),
        ({"input": ["a", 65]}, "invalid_value", "input"),
        ({"input": [-1]}, "invalid_value", "input"),
        ({"input": 5}, "invalid_value", "input"),
        ({"input": [300]}, "invalid_value", "input"),
        ({"input": [[65], [65, 300]]}, "invalid_value", "input[1]"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
        ({"input": "a" * 65}, "context_length_exceeded", "input"),
        ({"input": ["a", "a" * 65]}, "context_length_exceeded", "input"),
        ({"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": SIZE + 1}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": 2.5}, "invalid_value", "dimensions"),
        ({"input": "a", "user": 5}, "invalid_value", "user"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "unsupported_parameter", "truncate_prompt_tokens"),
        ({"input": "a", "add_special_tokens": False}, "unsupported_parameter", "add_special_tokens"),
    ],
)
def test_what_is_refused_names_its_field(vectors: Any, body: dict[str, Any], code: str, param: str) -> None:
    answer = vectors.ask(vectors.request({"model": "tiny", **body}, "/v1/embeddings"))
    assert answer.refusal() == (400, code)
    shown = json.loads(answer.body)["error"]["param"]
    assert shown is not None and shown.startswith(param)


def test_a_text_as_long_as_the_context_is_embedded(vectors: Any) -> None:
    assert vectors.client().embeddings.create(model="tiny", input="a" * 64).usage.prompt_tokens == 64
    assert vectors.client().models.retrieve("tiny").context_length == 64


def test_an_unknown_field_is_listed(vectors: Any) -> None:
    raw = vectors.client().embeddings.with_raw_response.create(model="tiny", input="a", extra_body={"colour": "red"})
    assert raw.headers["x-ignored-parameters"] == "colour"


def test_a_model_does_what_it_is_for(vectors: Any, shared: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="it generates text") as refused:
        shared.client().embeddings.create(model="tiny", input="a")
    assert (refused.value.code, refused.value.param) == ("model_not_supported", "model")
    client = vectors.client()
    with pytest.raises(openai.NotFoundError, match="not supported at /v1/chat/completions"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.NotFoundError, match="not supported at /v1/completions"):
        client.completions.create(model="tiny", prompt="Hi")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="hr_u_wrong").embeddings.create(model="tiny", input="a")
    wrong = vectors.ask(vectors.headed(method="GET", path="/v1/embeddings", body=b""))
    assert wrong.refusal() == (405, "method_not_supported")


def test_an_engine_that_fails_is_not_paid_for(vectors: Any) -> None:
    before = len(vectors.usage())
    vectors.script(fail_token=0)
    try:
        with pytest.raises(openai.InternalServerError, match="not charged"):
            vectors.client().embeddings.create(model="tiny", input=["a", "b"])
        assert [row[5] for row in vectors.usage()[before:]] == [0, 0]
    finally:
        vectors.script(fail_token=-1)


def test_a_call_that_fails_in_the_middle_costs_nothing(vectors: Any) -> None:
    """The engine takes less than it said: the 31st text is refused when others have long been computed."""
    before = len(vectors.usage())
    vectors.script(max_context=10)
    try:
        with pytest.raises(openai.BadRequestError, match="over the context of 10"):
            vectors.client().embeddings.create(model="tiny", input=["a"] * 30 + ["b" * 20])
        costs = [row[5] for row in vectors.usage()[before:]]
        assert len(costs) >= 24 and set(costs) == {0}
    finally:
        vectors.script(max_context=65)


def test_vectors_are_written_beside_the_event_loop(vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    render, by = EmbeddingAsk._render, set()

    def watched(self: EmbeddingAsk, vector: bytes | None) -> Any:
        by.add(threading.current_thread().name.partition("_")[0])
        return render(self, vector)

    monkeypatch.setattr(EmbeddingAsk, "_render", watched)
    assert len(vectors.client().embeddings.create(model="tiny", input=["a", "b"], encoding_format="float").data) == 2
    assert by == {"tokenise"}


def test_a_short_vector_is_as_long_as_the_whole() -> None:
    whole = array("f", [3.0, 0.0, 4.0]).tobytes()
    assert array("f", shortened(whole, 1)).tolist() == [5.0]
    assert shortened(whole, 3) == whole
    assert shortened(array("f", [0.0, 1.0]).tobytes(), 1) == array("f", [0.0]).tobytes()


def test_a_vector_that_never_came_is_our_error() -> None:
    ask = EmbeddingAsk(b'{"model":"m","input":"a"}')
    with pytest.raises(ApiError) as error:
        ask._render(None)
    assert error.value.status == 500
