"""Whether the file system below a container engine holds each container to a size: XFS that counts by project."""

from __future__ import annotations

from pathlib import Path

_COUNTS = frozenset({"prjquota", "pquota"})


def held(storage_driver: str, folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether an engine with this storage driver, whose storage is in `folder`, can be given a size for a container.

    Only overlay on XFS that is mounted with project quotas can; any other engine refuses the size, or ignores it.
    """
    if storage_driver not in ("overlay", "overlay2"):
        return False
    found: tuple[int, bool] = (-1, False)
    for line in mounts.read_text("utf-8", "replace").splitlines():
        before, _, after = line.partition(" - ")
        point, kind, *rest = Path(plain(before.split()[4])), *after.split()
        if folder.is_relative_to(point) and len(point.parts) >= found[0]:
            options = rest[-1].split(",") if rest else []
            found = len(point.parts), kind == "xfs" and not _COUNTS.isdisjoint(options)
    return found[1]


def plain(text: str) -> str:
    """A path of the kernel's list, in which a few characters are written by their number."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
