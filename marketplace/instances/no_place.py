"""Why something could not be placed, as its renter reads it."""

from __future__ import annotations

from typing import Any, NoReturn

from marketplace.http.errors import Code, Refusal
from marketplace.placement.choose import NoPlace, Rejected, Wanted


def refuse(wanted: Wanted, found: NoPlace) -> NoReturn:
    """Say why there is no place: for a named node its own reason, else how many nodes each step left."""
    if wanted.node_id is not None and not any(one.node_id == wanted.node_id for one in found.rejected):
        raise Refusal(Code.NODE_NOT_FOUND, "There is no such node.", param="selector")
    codes = {one.code for one in found.rejected}
    if "driver" in codes:
        raise Refusal(
            Code.IMAGE_DRIVER_MISMATCH, "The GPUs cannot load the kernel modules of this image.", param="config"
        )
    if wanted.node_id is not None:
        (one,) = found.rejected
        if one.step == "listing":
            raise Refusal(Code.NODE_NOT_FOUND, "There is no such node.", param="selector")
        if one.code == "mixed":
            raise Refusal(
                Code.NODE_ALLOCATION_MODE_MIXED,
                "The node changes how it allocates CPUs. Try again, or choose another node.",
                headers=(("Retry-After", "30"),),
            )
        raise Refusal(*_why(one), details=_details(one))
    if wanted.walled and codes <= {"walled", "capacity"} and "uncovered" not in codes:
        raise Refusal(Code.WALLED_TO_ALLOCATIONS, "You rent on the nodes of your allocations only.", param="selector")
    if "uncovered" in codes and (wanted.walled or wanted.require_coverage):
        raise Refusal(Code.NOT_COVERED_BY_QUOTA, "No allocation of yours covers it.", details=_steps(found))
    raise Refusal(
        Code.INSUFFICIENT_CAPACITY, "No node has room for it now: the details say why.", details=_steps(found)
    )


def _why(one: Rejected) -> tuple[Code, str]:
    if one.code == "reserved":
        return Code.CAPACITY_RESERVED, "Allocations hold the capacity that it needs; the details say what is left."
    if one.code == "uncovered":
        return Code.NOT_COVERED_BY_QUOTA, "No allocation of yours covers it."
    if one.code == "walled":
        return Code.WALLED_TO_ALLOCATIONS, "You rent on the nodes of your allocations only."
    return Code.INSUFFICIENT_CAPACITY, f"The node has no room for it: {one.reason}."


def _details(one: Rejected) -> dict[str, Any]:
    shown: dict[str, Any] = {"node_id": one.node_id, "step": one.step}
    for name, amount in (("unallocated", one.free), ("requested", one.asked)):
        if amount is not None:
            shown[name] = {
                "gpu_count": amount.gpu,
                "cpu_count": amount.threads,
                "dram": amount.dram,
                "disk": amount.disk,
            }
    return shown


def _steps(found: NoPlace) -> dict[str, Any]:
    return {"reasons": found.steps()}
