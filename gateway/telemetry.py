"""What the gateway tells Prometheus: latencies, queues, tokens, money, refusals, and the health of the engine.

Counting happens on the event loop at every request and every flush, so it is plain arithmetic on plain objects; the
metrics are made of it when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.wire import Snapshot
from gateway.metering.charge import Settlement

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
APART = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Spread:
    """A histogram of seconds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the upper bounds of the buckets, ascending; one without a bound follows."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """It took `seconds`, `times` times."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format has them."""
        bounds = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class ModelMeters:
    """What is counted about one model."""

    def __init__(self) -> None:
        self.first_token = Spread(FIRST)
        """From the request to its first token."""
        self.tokens_apart = Spread(APART)
        """Seconds per token, averaged over one flush."""
        self.duration = Spread(WHOLE)
        """From the request to the end of its answer."""
        self.in_flight = 0
        self.prompt = 0
        self.cached = 0
        """a part of `prompt`"""
        self.completion = 0
        self.charged = 0
        """nano-units"""
        self.outcomes: Counter[str] = Counter()
        self.moved = 0
        """Requests sent to another replica, because the first was lost before it said anything."""

    def settled(self, settlement: Settlement) -> None:
        """Count what one request has consumed and paid."""
        tokens = settlement.tokens
        self.prompt += tokens.prompt
        self.cached += tokens.cached
        self.completion += tokens.completion
        self.charged += settlement.cost
        self.outcomes[settlement.outcome] += 1


class Reading:
    """Values that are read when somebody asks, from whoever owns them."""

    def __init__(self) -> None:
        self.snapshots: dict[str, Snapshot | None] = {}
        """By model; None where the engine does not answer."""
        self.restarts: dict[str, int] = {}
        self.ready_replicas: dict[str, int] = {}
        self.awake: dict[str, bool] = {}
        self.open_holds = 0
        self.voided = 0
        self.free_tokens = 0
        self.journal_backlog = 0
        self.recovered = 0
        self.ready = False


class Telemetry:
    """Everything that is counted; `render` answers a scrape."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMeters] = {}
        self.requests: Counter[tuple[str, int]] = Counter()
        """Answers by route and status."""
        self.refusals: Counter[str] = Counter()
        """Error answers by code."""
        self.deprecated_logins: Counter[str] = Counter()
        """Registrations of nodes with something else than a key of their own, by what it was."""
        self.reading = Reading()
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(self))

    def model(self, name: str) -> ModelMeters:
        """What is counted about a model."""
        meters = self.models.get(name)
        if meters is None:
            meters = self.models[name] = ModelMeters()
        return meters

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


class _Metrics(Collector):
    """Makes metrics of a Telemetry at scrape time."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        yield from self._latencies()
        yield from self._counts()
        yield from self._house()
        yield from self._engines()

    def _latencies(self) -> Iterator[Metric]:
        for name, text, field in (
            ("time_to_first_token", "Request to first token", "first_token"),
            ("inter_token_latency", "Seconds per token, over each flush", "tokens_apart"),
            ("request_duration", "Request to end of answer", "duration"),
        ):
            family = HistogramMetricFamily(f"headrace_{name}_seconds", text, labels=["model"])
            for model, meters in self._telemetry.models.items():
                spread: Spread = getattr(meters, field)
                family.add_metric([model], spread.buckets(), spread.sum)
            yield family

    def _counts(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("headrace_requests", "Answers by route and status", labels=["route", "status"])
        for (route, status), count in self._telemetry.requests.items():
            requests.add_metric([route, str(status)], count)
        refusals = CounterMetricFamily("headrace_refusals", "Error answers by code", labels=["code"])
        for code, count in self._telemetry.refusals.items():
            refusals.add_metric([code], count)
        logins = CounterMetricFamily(
            "headrace_node_deprecated_logins", "Registrations of nodes without a node's key", labels=["with"]
        )
        for method, count in self._telemetry.deprecated_logins.items():
            logins.add_metric([method], count)
        tokens = CounterMetricFamily(
            "headrace_tokens", "Tokens metered; cached is a part of prompt", labels=["model", "kind"]
        )
        charged = CounterMetricFamily("headrace_charged_nano", "Nano-units charged", labels=["model"])
        outcomes = CounterMetricFamily(
            "headrace_outcomes", "Metered requests by how they ended", labels=["model", "outcome"]
        )
        moved = CounterMetricFamily(
            "headrace_requests_moved",
            "Sent again: their replica was lost before it answered",
            labels=["model"],
        )
        in_flight = GaugeMetricFamily("headrace_requests_in_flight", "Admitted and not ended", labels=["model"])
        for model, meters in self._telemetry.models.items():
            for kind in ("prompt", "cached", "completion"):
                tokens.add_metric([model, kind], getattr(meters, kind))
            charged.add_metric([model], meters.charged)
            for outcome, count in meters.outcomes.items():
                outcomes.add_metric([model, outcome], count)
            moved.add_metric([model], meters.moved)
            in_flight.add_metric([model], meters.in_flight)
        yield from (requests, refusals, logins, tokens, charged, outcomes, moved, in_flight)

    def _house(self) -> Iterator[Metric]:
        reading = self._telemetry.reading
        yield GaugeMetricFamily("headrace_ready", "1 when requests are served", float(reading.ready))
        yield GaugeMetricFamily("headrace_open_holds", "Holds that have not ended", reading.open_holds)
        yield GaugeMetricFamily(
            "headrace_journal_backlog", "Journal records that the ledger has not taken", reading.journal_backlog
        )
        yield CounterMetricFamily("headrace_voided_holds", "Holds given back unused", reading.voided)
        yield CounterMetricFamily("headrace_free_tokens", "Tokens metered and not charged", reading.free_tokens)
        yield CounterMetricFamily(
            "headrace_recovered_requests", "Requests of an earlier process ended at this start", reading.recovered
        )

    def _engines(self) -> Iterator[Metric]:
        reading = self._telemetry.reading
        up = GaugeMetricFamily("headrace_engine_up", "1 when the engine answers", labels=["model"])
        restarts = CounterMetricFamily("headrace_engine_restarts", "Times the engine was restarted", labels=["model"])
        ready = GaugeMetricFamily("headrace_engine_ready_replicas", "Replicas that answer requests", labels=["model"])
        awake = GaugeMetricFamily("headrace_model_awake", "1 while the model is loaded and awake", labels=["model"])
        for model, is_awake in reading.awake.items():
            awake.add_metric([model], float(is_awake))
        for model, count in reading.restarts.items():
            restarts.add_metric([model], count)
        for model, count in reading.ready_replicas.items():
            ready.add_metric([model], count)
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
                ("wait_ms", "Predicted wait of a long prompt that came now, before its own tokens are computed"),
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
                ("accepted_tokens", "Tokens generated that had been guessed"),
                ("rejected_tokens", "Guessed tokens that were computed and dropped"),
            )
        }
        for model, snapshot in reading.snapshots.items():
            up.add_metric([model], float(snapshot is not None))
            if snapshot is not None:
                for name, gauge in gauges.items():
                    gauge.add_metric([model], float(getattr(snapshot, name)))
                for name, counter in counters.items():
                    counter.add_metric([model], float(getattr(snapshot, name)))
        yield from (up, awake, restarts, ready, *gauges.values(), *counters.values())
