"""What engines remember of requests of an earlier gateway process, asked for by the name that they are billed under."""

from __future__ import annotations

from collections.abc import Sequence

from engine.wire import UsageReply
from gateway.fleet.catalogue import Catalogue
from gateway.fleet.deployment import Deployment
from gateway.fleet.fleet import Fleet


class Recall:
    """How recovery asks; see `gateway.metering.recovery.Engines`."""

    def __init__(self, fleet: Fleet, catalogue: Catalogue) -> None:
        self._fleet = fleet
        self._catalogue = catalogue

    async def usage(self, model: str, request_ids: Sequence[str]) -> UsageReply | None:
        """Counters that the engines of `model` remember; None where none can be asked."""
        asked = [await deployment.pool.usage(request_ids) for deployment in self._computing(model)]
        replies = [reply for reply in asked if reply is not None]
        if not replies:
            return None
        known = {request_id: usage for reply in replies for request_id, usage in reply.known.items()}
        return UsageReply(0, "+".join(reply.epoch for reply in replies), known)

    async def abort(self, model: str, request_id: str) -> None:
        """End a sequence of an earlier process."""
        for deployment in self._computing(model):
            await deployment.pool.abort(request_id)

    def _computing(self, model: str) -> list[Deployment]:
        """Whose engines compute what is billed as `model`: of an adapter its base's. One that was loaded while an
        earlier process served is not on offer any more, so that it may be anybody's."""
        known = self._catalogue.find(model)
        deployment = self._fleet.find(model if known is None else known.base)
        return list(self._fleet) if deployment is None else [deployment]
