"""A progress bar on the terminal for model downloads."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm


class TerminalProgress:
    """Shows one tqdm bar in bytes per thing fetched; pass the object as `progress`, and leave its context when done."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `what` are here."""
        if self._bar is None or what != self._what:
            self.close()
            self._what = what
            self._bar = tqdm(
                desc=what, total=total or None, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr
            )
        self._bar.update(max(done - self._bar.n, 0))

    def close(self) -> None:
        """Finish the bar that is shown, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
