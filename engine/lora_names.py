"""How adapters are named in settings; whoever reads those loads no tensors for it."""

from __future__ import annotations

from collections.abc import Sequence


def named(settings: Sequence[str]) -> dict[str, str]:
    """NAME=FOLDER of the settings, by name. Raises ValueError."""
    found: dict[str, str] = {}
    for setting in settings:
        name, _, folder = setting.partition("=")
        if not name or not folder or name in found:
            raise ValueError(f"lora {setting!r} must be NAME=FOLDER, with a name of its own")
        found[name] = folder
    return found
