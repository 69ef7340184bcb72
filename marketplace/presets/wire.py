"""Requests and answers about presets."""

from __future__ import annotations

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Limit, Wire


class ListRequest(Wire):
    """A page of the caller's presets, newest first."""

    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class PresetAnswer(Wire):
    """A shape that the caller rented."""

    id: str
    instance_type: str | None
    """of the node that it was rented on"""
    cpu_count: int
    dram: int
    disk: int
    gpu_count: int


class ListAnswer(Wire):
    """Presets, and where to go on."""

    presets: list[PresetAnswer]
    next_cursor: str | None


class DeleteRequest(Wire):
    """The preset to forget."""

    id: Id


class DeleteAnswer(Wire):
    """The preset that is gone."""

    id: str
