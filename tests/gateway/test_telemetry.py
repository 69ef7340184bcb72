"""What a scrape shows."""

from __future__ import annotations

from engine.wire import Snapshot
from gateway.metering.charge import Settlement
from gateway.telemetry import Telemetry
from marketplace.ledger.money import Tokens


def test_a_settlement_is_counted_by_kind_and_outcome() -> None:
    telemetry = Telemetry()
    model = telemetry.model("tiny")
    model.settled(Settlement(Tokens(10, 4, 7), "finished", True, "completed", 900))
    model.settled(Settlement(Tokens(3, 0, 1), "engine_error", False, "engine_error", 0))
    model.first_token.observe(0.02)
    model.tokens_apart.observe(0.004, 3)
    model.tokens_apart.observe(7.0)
    text = telemetry.render().decode()
    for line in (
        'headrace_tokens_total{kind="prompt",model="tiny"} 13.0',
        'headrace_tokens_total{kind="cached",model="tiny"} 4.0',
        'headrace_tokens_total{kind="completion",model="tiny"} 8.0',
        'headrace_charged_nano_total{model="tiny"} 900.0',
        'headrace_outcomes_total{model="tiny",outcome="finished"} 1.0',
        'headrace_outcomes_total{model="tiny",outcome="engine_error"} 1.0',
        'headrace_time_to_first_token_seconds_bucket{le="0.025",model="tiny"} 1.0',
        'headrace_inter_token_latency_seconds_bucket{le="0.005",model="tiny"} 3.0',
        'headrace_inter_token_latency_seconds_bucket{le="0.0025",model="tiny"} 0.0',
        'headrace_inter_token_latency_seconds_bucket{le="+Inf",model="tiny"} 4.0',
        'headrace_inter_token_latency_seconds_count{model="tiny"} 4.0',
    ):
        assert line in text, line


def test_an_engine_that_does_not_answer_is_down() -> None:
    telemetry = Telemetry()
    reading = telemetry.reading
    reading.restarts["tiny"] = 3
    reading.snapshots["tiny"] = None
    text = telemetry.render().decode()
    assert 'headrace_engine_up{model="tiny"} 0.0' in text
    assert 'headrace_engine_restarts_total{model="tiny"} 3.0' in text
    assert 'headrace_engine_running{model="tiny"}' not in text
    reading.snapshots["tiny"] = Snapshot(
        query_id=1,
        epoch="e",
        running=2,
        waiting=1,
        queued_tokens=9,
        kv_pages_total=100,
        kv_pages_used=40,
        kv_pages_cached=5,
        steps=7,
        preemptions=0,
        prompt_tokens=50,
        cached_tokens=20,
        completion_tokens=30,
        last_step_ms=1.5,
        accepted_tokens=8,
        rejected_tokens=6,
    )
    text = telemetry.render().decode()
    assert 'headrace_engine_up{model="tiny"} 1.0' in text
    assert 'headrace_engine_waiting{model="tiny"} 1.0' in text
    assert 'headrace_engine_cached_tokens_total{model="tiny"} 20.0' in text
    assert 'headrace_engine_accepted_tokens_total{model="tiny"} 8.0' in text
    assert 'headrace_engine_rejected_tokens_total{model="tiny"} 6.0' in text


def test_two_registries_do_not_meet() -> None:
    first, second = Telemetry(), Telemetry()
    first.refusals["x"] += 1
    assert 'headrace_refusals_total{code="x"} 1.0' in first.render().decode()
    assert 'headrace_refusals_total{code="x"}' not in second.render().decode()
