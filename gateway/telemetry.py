"""What the gateway tells Prometheus: latencies, queues, tokens, money, refusals, and the health of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.wire import Snapshot
from gateway.metering.charge import Settlement

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_APART = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Reading:
    """Values that are read when somebody asks, from whoever owns them."""

    def __init__(self) -> None:
        self.snapshots: dict[str, Snapshot | None] = {}
        """By model; None where the engine does not answer."""
        self.restarts: dict[str, int] = {}
        self.open_holds = 0
        self.voided = 0
        self.free_tokens = 0
        self.journal_backlog = 0
        self.ready = False


class Gaps:
    """A histogram that is cheap enough for every flush: seconds per token, weighted by tokens."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_APART) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` apart."""
        self.counts[bisect_left(_APART, seconds)] += tokens
        self.sum += seconds * tokens

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format has them."""
        bounds = [*(str(bound) for bound in _APART), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class ModelMeters:
    """The metrics of one model, labels already bound: nothing is looked up per chunk."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self.first_token: Callable[[float], None] = telemetry.ttft.labels(model).observe
        """Seconds from the request to its first token."""
        self.tokens_apart = telemetry.gaps.setdefault(model, Gaps()).observe
        """Seconds per token, averaged over one flush, and how many tokens."""
        self.duration: Callable[[float], None] = telemetry.duration.labels(model).observe
        """Seconds from the request to the end of its answer."""
        self.in_flight = telemetry.in_flight.labels(model)
        self._prompt = telemetry.tokens.labels(model, "prompt").inc
        self._cached = telemetry.tokens.labels(model, "cached").inc
        self._completion = telemetry.tokens.labels(model, "completion").inc
        self._charged = telemetry.charged.labels(model).inc
        self._outcomes = telemetry.outcomes
        self._model = model

    def settled(self, settlement: Settlement) -> None:
        """Count what one request has consumed and paid. `cached` tokens are a part of `prompt`."""
        tokens = settlement.tokens
        self._prompt(tokens.prompt)
        self._cached(tokens.cached)
        self._completion(tokens.completion)
        self._charged(settlement.cost)
        self._outcomes.labels(self._model, settlement.outcome).inc()


class Telemetry:
    """One registry; `render` answers a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reading = Reading()
        registry = self.registry
        self.ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "Request to first token",
            ["model"],
            buckets=_FIRST,
            registry=registry,
        )
        self.gaps: dict[str, Gaps] = {}
        self.duration = Histogram(
            "headrace_request_duration_seconds",
            "Request to end of answer",
            ["model"],
            buckets=_WHOLE,
            registry=registry,
        )
        self.in_flight = Gauge("headrace_requests_in_flight", "Admitted and not ended", ["model"], registry=registry)
        self.requests = Counter(
            "headrace_requests", "Answers by route and status", ["route", "status"], registry=registry
        )
        self.refusals = Counter("headrace_refusals", "Error answers by code", ["code"], registry=registry)
        self.outcomes = Counter(
            "headrace_outcomes", "Metered requests by how they ended", ["model", "outcome"], registry=registry
        )
        self.tokens = Counter(
            "headrace_tokens", "Tokens metered; cached is a part of prompt", ["model", "kind"], registry=registry
        )
        self.charged = Counter("headrace_charged_nano", "Nano-units charged", ["model"], registry=registry)
        registry.register(_Readings(self.reading, self.gaps))

    def model(self, name: str) -> ModelMeters:
        """Metrics of a model."""
        return ModelMeters(self, name)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _Readings(Collector):
    """Renders a Reading at scrape time."""

    def __init__(self, reading: Reading, gaps: dict[str, Gaps]) -> None:
        self._reading = reading
        self._gaps = gaps

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and counters that others own."""
        reading = self._reading
        apart = HistogramMetricFamily(
            "headrace_inter_token_latency_seconds", "Seconds per token, over each flush", labels=["model"]
        )
        for model, gaps in self._gaps.items():
            apart.add_metric([model], gaps.buckets(), gaps.sum)
        yield apart
        yield GaugeMetricFamily("headrace_ready", "1 when requests are served", float(reading.ready))
        yield GaugeMetricFamily("headrace_open_holds", "Holds that have not ended", float(reading.open_holds))
        yield GaugeMetricFamily(
            "headrace_journal_backlog", "Journal records that the ledger has not taken", float(reading.journal_backlog)
        )
        yield CounterMetricFamily("headrace_voided_holds", "Holds given back unused", float(reading.voided))
        yield CounterMetricFamily("headrace_free_tokens", "Tokens metered and not charged", float(reading.free_tokens))
        up = GaugeMetricFamily("headrace_engine_up", "1 when the engine answers", labels=["model"])
        restarts = CounterMetricFamily("headrace_engine_restarts", "Times the engine was restarted", labels=["model"])
        for model, count in reading.restarts.items():
            restarts.add_metric([model], float(count))
        gauges = {
            name: GaugeMetricFamily(f"headrace_engine_{name}", text, labels=["model"])
            for name, text in (
                ("running", "Sequences that share steps"),
                ("waiting", "Sequences that wait"),
                ("queued_tokens", "Prompt tokens that wait to be computed"),
                ("kv_pages_total", "Pages of the KV cache"),
                ("kv_pages_used", "Pages owned by live sequences"),
                ("kv_pages_cached", "Pages owned by nobody that can still be hit"),
                ("last_step_ms", "Duration of the last step"),
            )
        }
        counters = {
            name: CounterMetricFamily(f"headrace_engine_{name}", text, labels=["model"])
            for name, text in (
                ("steps", "Steps executed"),
                ("preemptions", "Sequences preempted for memory"),
                ("prompt_tokens", "Prompt tokens taken in"),
                ("cached_tokens", "Prompt tokens found in the prefix cache"),
                ("completion_tokens", "Tokens generated"),
            )
        }
        for model, snapshot in reading.snapshots.items():
            up.add_metric([model], float(snapshot is not None))
            if snapshot is not None:
                for name, gauge in gauges.items():
                    gauge.add_metric([model], float(getattr(snapshot, name)))
                for name, counter in counters.items():
                    counter.add_metric([model], float(getattr(snapshot, name)))
        yield up
        yield restarts
        yield from gauges.values()
        yield from counters.values()
