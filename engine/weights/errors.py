"""The one error of model loading."""

from __future__ import annotations


class WeightsError(Exception):
    """A model cannot be found, fetched, read or run. The message names the file, and the tensor or field where there is
    one."""
