"""An engine's queues and counters at one moment, as the wire says them."""

from __future__ import annotations

from engine.metrics import EngineMetrics
from engine.monitor import MONITOR
from engine.scheduler import Scheduler
from engine.wire import Snapshot


def snapshot(query_id: int, epoch: str, scheduler: Scheduler, metrics: EngineMetrics, wait_s: float) -> Snapshot:
    """Queues and gauges now; wait_s: predicted wait of a long prompt that came now."""
    running, waiting, pool = scheduler.running, scheduler.waiting, scheduler.pool
    queued = sum(len(request.tokens) for request in waiting)
    queued += sum(pending for request in running if (pending := len(request.tokens) - request.computed) > 1)
    return Snapshot(
        query_id=query_id,
        epoch=epoch,
        running=len(running),
        waiting=len(waiting),
        queued_tokens=queued,
        kv_pages_total=pool.num_pages,
        kv_pages_used=pool.owned,
        kv_pages_cached=pool.cached,
        steps=metrics.steps,
        preemptions=metrics.preemptions,
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        completion_tokens=metrics.completion_tokens,
        accepted_tokens=metrics.accepted_tokens,
        rejected_tokens=metrics.rejected_tokens,
        last_step_ms=metrics.last_step_ms,
        late_compilations=MONITOR.late,
        wait_ms=wait_s * 1e3,
    )
