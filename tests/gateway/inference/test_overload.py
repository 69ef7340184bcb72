"""A request whose first token would come too late, as clients see it: refused at once, with a time to come back."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from engine.wire import Refused, Submit

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_refused_with_503_and_the_engine_s_time_to_come_back(make_house: Any, stream: bool) -> None:
    house = make_house({"refuse": "overloaded", "retry_after_s": 2.5})
    with pytest.raises(openai.InternalServerError) as caught:
        house.client().chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    refusal = caught.value
    assert (refusal.status_code, refusal.code, refusal.type) == (
        503,
        "server_is_overloaded",
        "service_unavailable_error",
    )
    assert "busy" in refusal.message and "retry" in refusal.message
    headers = refusal.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2500")
    assert [(row[0], row[1], row[5]) for row in house.usage()] == [("refused", 0, 0)]


def test_nobody_is_sent_away_for_longer_than_a_minute(make_house: Any) -> None:
    house = make_house({"refuse": "overloaded", "retry_after_s": 1e6})
    with pytest.raises(openai.InternalServerError) as caught:
        house.client().completions.create(model="tiny", prompt="Hi")
    assert caught.value.response.headers["retry-after"] == "60"


def test_the_official_client_comes_back_by_itself_and_is_served(make_house: Any) -> None:
    house = make_house()
    core, seen = house.engine.core, []
    take = core.submit

    def busy_once(submit: Submit) -> Refused | None:
        seen.append(submit.request_id)
        return Refused(submit.request_id, "overloaded", "in a moment", 0.05) if len(seen) == 1 else take(submit)

    house.do(lambda: setattr(core, "submit", busy_once))
    answer = house.client(max_retries=1).chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    assert len(set(seen)) == 2
    assert [row[0] for row in house.usage()] == ["refused", "finished"]


def test_all_answers_of_a_request_are_refused_as_one(make_house: Any) -> None:
    house = make_house({"refuse": "overloaded"})
    with pytest.raises(openai.InternalServerError) as caught:
        house.client().chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert caught.value.response.headers["retry-after"] == "1"
    assert [row[0] for row in house.usage()] == ["refused"]
