"""Which node and which parts of it."""

from __future__ import annotations

from typing import Any

import pytest

from marketplace.placement.capacity import GIB, Amount, Standing
from marketplace.placement.choose import NoPlace, Placement, Rejected, Wanted, choose, fit
from marketplace.placement.view import Core, GpuView, Made, NodeView, Profile

TB = 1 << 40
_MIG = {"1g.10gb": Profile(1, tuple(range(7))), "3g.40gb": Profile(4, (0, 4)), "7g.80gb": Profile(8, (0,))}


def gpus(count: int, **more: Any) -> tuple[GpuView, ...]:
    return tuple(
        GpuView(id=f"g{n}", number=n, pci_slot=f"0000:{n + 1:02x}:00.0", numa=n * 2 // max(count, 1), **more)
        for n in range(count)
    )


def cores(count: int, numas: int = 2) -> tuple[Core, ...]:
    return tuple(Core(n * numas // count, (n, n + count)) for n in range(count))


def node(name: str = "n1", count: int = 8, **more: Any) -> NodeView:
    base: dict[str, Any] = {"gpus": gpus(count), "cores": cores(16), "memory": 256 * GIB, "disk": TB}
    return NodeView(id=name, **{**base, **more})


def wanted(**more: Any) -> Wanted:
    base: dict[str, Any] = {"kind": "VirtualMachine", "gpus": 1, "vcpu": 2, "dram": 8 * GIB, "disk": 10 * GIB}
    return Wanted(**{**base, **more})


def placed(found: Placement | NoPlace | Rejected) -> Placement:
    assert isinstance(found, Placement), found
    return found


def numbers(found: Placement) -> list[int]:
    return [part.gpu.number for part in found.slices]


def refused(found: Placement | Rejected) -> Rejected:
    assert isinstance(found, Rejected), found
    return found


def taken(view: NodeView, *which: int, by: str = "rented", **more: Any) -> NodeView:
    changed = tuple(
        GpuView(
            id=g.id,
            number=g.number,
            pci_slot=g.pci_slot,
            numa=g.numa,
            **({by: frozenset(range(8)), **more} if g.number in which else {}),
        )
        for g in view.gpus
    )
    return NodeView(
        **{name: getattr(view, name) for name in view.__struct_fields__ if name not in ("gpus", "used")},
        gpus=changed,
        used=Amount(sum(bool(g.rented) for g in changed)),
    )


def test_the_node_with_the_fewest_free_gpus_that_fits_is_chosen() -> None:
    nodes = [node("large", 8), taken(node("fuller", 8), 0, 1, 2, 3, 4), node("small", 1)]
    assert placed(choose(nodes, wanted())).node.id == "small"
    assert placed(choose(nodes, wanted(gpus=2))).node.id == "fuller"
    assert placed(choose(nodes, wanted(gpus=4))).node.id == "large"


def test_every_node_that_is_passed_over_has_a_reason_and_the_steps_are_counted() -> None:
    nodes = [
        node("away", datacenter_id="eu-2"),
        node("hidden", listed=False, datacenter_id="eu-1"),
        node("draining", drain_state="Draining", datacenter_id="eu-1"),
        node("none", 0, datacenter_id="eu-1"),
        node("mixed", cpu_mode="Mixed", datacenter_id="eu-1"),
    ]
    found = choose(nodes, wanted(datacenters=frozenset({"eu-1"})))
    assert isinstance(found, NoPlace)
    assert {one.node_id: one.step for one in found.rejected} == {
        "away": "location",
        "hidden": "listing",
        "draining": "state",
        "none": "gpu",
        "mixed": "mode",
    }
    assert found.steps() == {
        "nodes": 5,
        "after_location": 4,
        "after_state": 3,
        "after_listing": 2,
        "after_mode": 1,
        "after_gpu": 0,
    }


def test_gpus_of_one_numa_node_come_first() -> None:
    view = taken(node(), 0, 1)
    assert numbers(placed(fit(view, wanted(gpus=2)))) == [2, 3]
    assert numbers(placed(fit(view, wanted(gpus=3)))) == [4, 5, 6]
    assert numbers(placed(fit(view, wanted(gpus=6)))) == [4, 5, 6, 7, 2, 3]


@pytest.mark.parametrize(("count", "found"), [(1, [2]), (2, [2, 3]), (4, [4, 5, 6, 7]), (8, None), (3, None)])
def test_a_board_with_a_switch_hands_on_aligned_sets(count: int, found: list[int] | None) -> None:
    view = taken(node(nvswitch=True), 0, 1)
    got = fit(view, wanted(gpus=count))
    assert (numbers(got) if isinstance(got, Placement) else None) == found


def test_idle_gpus_come_before_those_that_inference_must_leave() -> None:
    view = taken(node(), 0, 1, 2, by="leased", reclaimable=True)
    assert numbers(placed(fit(view, wanted()))) == [3]
    assert len(numbers(placed(fit(view, wanted(gpus=8))))) == 8
    kept = taken(node(), 0, 1, 2, by="leased")
    assert refused(fit(kept, wanted(gpus=6))).step == "gpu"
    floor = node(inference_floor=7)
    assert placed(fit(floor, wanted())) and refused(fit(floor, wanted(gpus=2))).step == "gpu"


def test_broken_and_disabled_gpus_are_never_handed_on() -> None:
    view = node(gpus=gpus(2, usable=False))
    assert refused(fit(view, wanted())).step == "gpu"
    assert view.capacity.gpu == 0


def test_mig_goes_to_split_gpus_first_and_never_below_a_whole_one() -> None:
    def one(number: int, split: bool, used: set[int]) -> GpuView:
        slot = f"0000:0{number}:00.0"
        return GpuView(
            id=f"g{number}",
            number=number,
            pci_slot=slot,
            mig_enabled=split,
            profiles=_MIG,
            rented=frozenset(used),
        )

    view = node(gpus=(one(0, False, set()), one(1, True, {0}), one(2, True, {0, 1, 2, 3})))
    small = wanted(kind="Container", gpus=1, mig_profile="1g.10gb", cpu_policy="Shared")
    (part,) = placed(fit(view, small)).slices
    assert (part.gpu.number, part.slices, part.start) == (2, (4,), 4)
    (large,) = placed(fit(view, wanted(kind="Container", mig_profile="7g.80gb"))).slices
    assert large.gpu.number == 0
    assert numbers(placed(fit(view, wanted(gpus=1)))) == [0], "a whole GPU is never one that is split"
    assert refused(fit(view, wanted(mig_profile="1g.10gb"))).step == "service", "containers only"
    assert placed(fit(node(gpus=view.gpus, vm_mig=True), wanted(mig_profile="1g.10gb")))
    telling = node(gpus=(one(0, False, {0, 1}), one(1, False, set())))
    (beside,) = placed(fit(telling, small)).slices
    assert (beside.gpu.number, beside.start) == (0, 2), "it is going to be split, whether its node has told or not"
    full = node(gpus=(one(0, False, set(range(8))),))
    assert refused(fit(full, small)).step == "gpu"


def test_mig_goes_to_the_gpus_that_are_named() -> None:
    small = wanted(kind="Container", gpus=2, mig_profile="3g.40gb", cpu_policy="Shared", gpu_numbers=(1,))
    found = placed(fit(node(gpus=gpus(3, profiles=_MIG)), small))
    assert (numbers(found), [part.start for part in found.slices]) == ([1, 1], [0, 4])
    assert refused(fit(taken(node(gpus=gpus(3, profiles=_MIG)), 1), small)).step == "gpu"


def test_mig_instances_that_others_made_are_used_or_avoided() -> None:
    def one(number: int, *made: Made) -> GpuView:
        slot = f"0000:0{number}:00.0"
        return GpuView(id=f"g{number}", number=number, pci_slot=slot, mig_enabled=True, profiles=_MIG, made=made)

    def place(*gpus: GpuView, profile: str = "1g.10gb") -> tuple[int, int | None]:
        (part,) = placed(fit(node(gpus=gpus), wanted(kind="Container", mig_profile=profile))).slices
        return part.gpu.number, part.start

    whole, same, other = Made("7g.80gb", 0, 8), Made("1g.10gb", 0, 1), Made("2g.20gb", 0, 2)
    assert place(one(0, same)) == (0, 0) and place(one(0, other)) == (0, 2)
    assert (
        place(one(0, other), one(1), profile="7g.80gb")
        == (1, 0)
        == place(one(0, other), one(1, whole), profile="7g.80gb")
    )
    assert place(one(0, other), profile="7g.80gb") == (0, 0), "it may be gone by then"


def test_dedicated_cores_are_whole_and_near_the_gpu() -> None:
    found = placed(fit(taken(node(), 0, 1, 2, 3), wanted(vcpu=3)))
    assert found.cpus == {1: (8, 9, 10, 24, 25, 26)} and found.amount.threads == 6
    packed = placed(fit(node(), wanted(vcpu=3, cpu_policy="Packed")))
    assert packed.cpus == {0: (0, 1, 16, 17)} and packed.amount.threads == 4
    shared = placed(fit(node(), wanted(vcpu=3, cpu_policy="Shared")))
    assert shared.cpus == {} and shared.amount.threads == 3
    spread = placed(fit(node(), wanted(vcpu=12)))
    assert {numa: len(threads) for numa, threads in spread.cpus.items()} == {0: 16, 1: 8}
    assert refused(fit(node(threads_claimed=frozenset(range(10))), wanted(vcpu=7))).step == "cpu"


def test_sharing_beyond_the_threads_needs_both_sides() -> None:
    view = node(overcommit_percent=400)
    assert placed(fit(view, wanted(vcpu=64, cpu_policy="Shared", overcommit=True))).amount.threads == 16
    assert refused(fit(view, wanted(vcpu=64, cpu_policy="Shared"))).step == "cpu"


def test_memory_comes_in_pages_of_the_numa_nodes_that_the_threads_are_on() -> None:
    view = node(hugepages={0: 16, 1: 16}, memory=64 * GIB)
    found = placed(fit(view, wanted(dram=8 * GIB + 1)))
    assert found.hugepages == {0: 9} and found.amount.dram == 9 * GIB
    assert view.capacity.dram == 32 * GIB, "never more than the pool"
    assert refused(fit(view, wanted(dram=17 * GIB))).step == "memory"
    half = placed(fit(view, wanted(vcpu=16, dram=20 * GIB)))
    assert half.hugepages == {0: 10, 1: 10}
    floating = node(hugepages={0: 16, 1: 16}, cpu_mode="Legacy")
    assert placed(fit(floating, wanted(dram=4 * GIB))).hugepages == {0: 4, 1: 4}
    assert placed(fit(view, wanted(kind="Container"))).hugepages == {}


_QUOTA = Standing("q", "ada", Amount(4, 16, 64 * GIB, TB // 2), Amount(1, 4, 8 * GIB, 0))


def test_a_holder_is_covered_or_rejected_and_never_split() -> None:
    view = node(standings=(_QUOTA,), used=Amount(1, 4, 8 * GIB, 0))
    mine = frozenset({"ada"})
    assert placed(fit(view, wanted(accounts=mine, gpus=3, node_id="n1"))).quota_id == "q"
    assert refused(fit(view, wanted(accounts=mine, gpus=4))).code == "uncovered"
    assert refused(fit(node("n2"), wanted(accounts=mine, walled=True))).code == "walled"
    assert refused(fit(node("n2"), wanted(require_coverage=True))).code == "uncovered"


def test_others_get_what_no_quota_holds_where_they_name_the_node() -> None:
    view = node(standings=(_QUOTA,), used=Amount(1, 4, 8 * GIB, 0))
    auto = refused(fit(view, wanted()))
    assert (auto.step, auto.code) == ("allocation", "reserved")
    assert placed(fit(view, wanted(auto_assign_quota_nodes=True))).quota_id is None
    assert placed(fit(view, wanted(node_id="n1", gpus=4))).quota_id is None
    left = refused(fit(view, wanted(node_id="n1", gpus=5)))
    assert left.code == "reserved" and left.free == Amount(4, 16, 192 * GIB, TB // 2)
    full = node(standings=(_QUOTA,), used=Amount(8, 4, 0, 0))
    assert refused(fit(full, wanted(node_id="n1"))).code == "capacity"


@pytest.mark.parametrize(
    ("modules", "tag", "fits"),
    [
        ("ProprietaryOnly", "gpuvendor-driver", False),
        ("ProprietaryOnly", "gpuvendor-driver-proprietary", True),
        ("OpenOnly", "gpuvendor-driver-proprietary", False),
        ("OpenOnly", "gpuvendor-driver", True),
        ("OpenOrProprietary", "gpuvendor-driver", True),
        ("Unknown", "gpuvendor-driver-proprietary", True),
        ("OpenOnly", "", True),
    ],
)
def test_drivers_of_an_image_must_load(modules: str, tag: str, fits: bool) -> None:
    found = fit(node(gpus=gpus(1, modules=modules)), wanted(image_tags=frozenset({tag} - {""})))
    assert isinstance(found, Placement) == fits
    assert fits or refused(found).code == "driver"


def test_people_may_name_gpus_and_threads() -> None:
    found = placed(fit(node(), wanted(gpus=2, gpu_numbers=(1, 6), cpu_ids=(3, 19, 4, 20))))
    assert numbers(found) == [1, 6] and found.cpus == {0: (3, 4, 19, 20)}
    assert refused(fit(taken(node(), 1), wanted(gpus=2, gpu_numbers=(1, 6)))).step == "gpu"
