"""Runs load cases against one or several servers in alternation and turns replies into the usual figures.

TTFT: request sent → first non-empty content. TPOT: (last − first content) / (completion tokens − 1), tokens from
`usage`. ITL: gaps between events with content; a server that puts several tokens into an event shows fewer, larger
gaps, hence `tokens_per_event` beside it. Output tokens per second: all completion tokens over the duration of the case.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.rig.cases import Case, chat_body, prompts
from benchmarks.rig.http import Endpoint, Reply, chat
from benchmarks.rig.machine import Load, LoadMeter, wait_until_quiet
from benchmarks.rig.results import Row, percentile


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Figures of one case on one server; times in milliseconds."""

    label: str
    case: str
    repetition: int
    concurrency: int
    requests: int
    completed: int
    failures: list[str]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    output_tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    e2e_p50_ms: float
    tokens_per_event: float
    load: Load
    busy_before: float
    """Share of the machine in use just before the case (0 where it was not looked at)."""

    def row(self) -> Row:
        """Return the line of the printed table."""
        return {
            "server": self.label,
            "case": self.case,
            "ok": f"{self.completed}/{self.requests}",
            "in": self.prompt_tokens,
            "out": self.output_tokens,
            "out tok/s": self.output_tok_s,
            "ttft p50": self.ttft_p50_ms,
            "ttft p99": self.ttft_p99_ms,
            "tpot p50": self.tpot_p50_ms,
            "itl p50": self.itl_p50_ms,
            "itl p99": self.itl_p99_ms,
            "e2e p50": self.e2e_p50_ms,
            "tok/event": self.tokens_per_event,
            "others %": 100 * self.load.others_share,
            "stolen %": 100 * self.load.stolen_share,
            "rss MiB": self.load.server_rss_mib,
        }


def figures(
    label: str, case: Case, repetition: int, replies: Sequence[Reply], duration: float, load: Load, busy_before: float
) -> CaseResult:
    """Compute the figures of a case from its replies; failed requests are listed and left out of every figure."""
    good = [reply for reply in replies if reply.ok and reply.contents]
    usages = [reply.usage for reply in good if reply.usage is not None]
    gaps = [b - a for reply in good for a, b in zip(reply.contents, reply.contents[1:])]
    per_token = [
        (reply.contents[-1] - reply.contents[0]) / (reply.usage.completion_tokens - 1)
        for reply in good
        if reply.usage is not None and reply.usage.completion_tokens > 1
    ]
    output = sum(usage.completion_tokens for usage in usages)
    events = sum(len(reply.contents) for reply in good)

    def ms(values: Sequence[float], share: float) -> float:
        return 1000 * percentile(values, share)

    return CaseResult(
        label=label,
        case=case.name,
        repetition=repetition,
        concurrency=case.concurrency,
        requests=len(replies),
        completed=len(good),
        failures=sorted({reply.complaint for reply in replies if reply not in good})[:5],
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached for usage in usages),
        output_tokens=output,
        duration_s=duration,
        output_tok_s=output / duration,
        ttft_p50_ms=ms([reply.ttft for reply in good], 0.5),
        ttft_p99_ms=ms([reply.ttft for reply in good], 0.99),
        tpot_p50_ms=ms(per_token, 0.5),
        itl_p50_ms=ms(gaps, 0.5),
        itl_p99_ms=ms(gaps, 0.99),
        e2e_p50_ms=ms([reply.e2e for reply in good], 0.5),
        tokens_per_event=output / max(1, events),
        load=load,
        busy_before=busy_before,
    )


async def drive(endpoint: Endpoint, bodies: Sequence[bytes], concurrency: int) -> list[Reply]:
    """Send the bodies in order from `concurrency` clients in a closed loop; return the replies in the same order."""
    replies: list[Reply | None] = [None] * len(bodies)
    todo = iter(enumerate(bodies))

    async def one_client() -> None:
        for index, body in todo:
            replies[index] = await chat(endpoint, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_client())
    return [reply for reply in replies if reply is not None]


async def run_case(
    endpoint: Endpoint, case: Case, repetition: int = 1, quiet_s: float = 0.0, limit_s: float = 600.0
) -> CaseResult:
    """Warm the server with one request, then measure the case. Raises TimeoutError after `limit_s`."""
    *texts, warm_up = (
        chat_body(endpoint.model, prompt, case.output_tokens) for prompt in prompts(case, seed=repetition)
    )
    async with asyncio.timeout(limit_s):
        await drive(endpoint, [warm_up], 1)
        busy = await asyncio.to_thread(wait_until_quiet, quiet_s)
        meter, started = LoadMeter(endpoint.pid), time.perf_counter()
        replies = await drive(endpoint, texts, case.concurrency)
        duration = time.perf_counter() - started
    return figures(endpoint.label, case, repetition, replies, duration, meter.stop(), busy)


def alternate(
    endpoints: Sequence[Endpoint],
    cases: Sequence[Case],
    repetitions: int = 1,
    quiet_s: float = 0.0,
    limit_s: float = 600.0,
) -> list[CaseResult]:
    """Run every case on every server, server after server within a case, in the opposite order every second time."""
    results = []
    for repetition in range(1, repetitions + 1):
        for case in cases:
            for endpoint in endpoints if repetition % 2 else reversed(endpoints):
                try:
                    result = asyncio.run(run_case(endpoint, case, repetition, quiet_s, limit_s))
                except TimeoutError:
                    print(f"{endpoint.label} {case.name}: not done within {limit_s:.0f} s, left out", flush=True)
                    continue
                results.append(result)
                print(
                    f"{result.label:16s} {result.case:8s} r{repetition} {result.output_tok_s:8.1f} tok/s  "
                    f"ttft p50 {result.ttft_p50_ms:8.1f} ms  tpot p50 {result.tpot_p50_ms:7.1f} ms  "
                    f"others {100 * result.load.others_share:3.0f} %  {'; '.join(result.failures)}",
                    flush=True,
                )
    return results


FIGURES = ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms")


def ratios(results: Sequence[CaseResult], ours: str) -> list[Row]:
    """Return per case the median of each of FIGURES on `ours` over that of every other server (1 is level)."""
    rows: list[Row] = []
    labels = list(dict.fromkeys(result.label for result in results))
    for case in dict.fromkeys(result.case for result in results):
        for peer in labels:
            if peer == ours:
                continue
            mine, theirs = (_medians(results, case, label) for label in (ours, peer))
            if mine and theirs:
                rows.append(
                    {"case": case, "ratio": f"{ours} / {peer}", **{key: mine[key] / theirs[key] for key in FIGURES}}
                )
    return rows


def as_json(results: Sequence[CaseResult]) -> list[dict[str, object]]:
    """Return the results as plain data."""
    return [asdict(result) for result in results]


def _medians(results: Sequence[CaseResult], case: str, label: str) -> dict[str, float]:
    chosen = [result for result in results if result.case == case and result.label == label and result.completed]
    return {key: percentile([getattr(result, key) for result in chosen], 0.5) for key in FIGURES} if chosen else {}
