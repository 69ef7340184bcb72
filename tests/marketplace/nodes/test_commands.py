"""What nodes are asked to do once: GPUs are reset where nobody has them, in the session that it was asked in."""

from __future__ import annotations

from typing import Any

from marketplace.agent.wire import CommandResult
from marketplace.nodes import commands
from tests.marketplace.office import Answer, Caller
from tests.marketplace.rack import Rack

SECOND = 1_000_000
SLOT = "0000:01:00.0"


def reset(rack: Rack, who: Caller, node_id: str, slot: str = SLOT) -> Answer:
    rack.office.wait(5)
    return rack.office.ask("nodes.gpu_reset", {"node_id": node_id, "pci_slot": slot}, who)


def known(rack: Rack, who: Caller, node_id: str) -> list[dict[str, Any]]:
    rack.office.wait(1)
    answer = rack.office.ask("nodes.commands_list", {"selector": {"ById": [node_id]}}, who)
    assert answer.status == 200, answer.body
    return list(answer.body["commands"])


def test_a_gpu_is_reset_once_and_what_became_of_it_is_told(rack: Rack) -> None:
    node, people, admin = rack.node(gpus=2), rack.operator(), rack.office.person("admin")
    node.poll()
    made = reset(rack, people, node.node_id)
    assert made.status == 200, made.body
    command_id = made.body["command_id"]
    assert reset(rack, admin, node.node_id).body == {"command_id": command_id}, "asked for already"
    (told,) = node.poll().commands
    assert (told.id, told.kind, told.args) == (command_id, "gpu_reset", {"pci_slot": SLOT})
    assert node.poll(commands=[command_id]).commands == [], "it is under way"
    assert [one.id for one in node.poll().commands] == [command_id], "its agent was killed and knows nothing of it"
    assert [one["status"] for one in known(rack, people, node.node_id)] == ["Queued"]
    for _ in range(2):
        node.poll(command_results=[CommandResult(id=command_id, ok=True, output="the GPU was reset")])
    (shown,) = known(rack, people, node.node_id)
    assert (shown["status"], shown["output"], shown["args"]) == ("Completed", "the GPU was reset", {"pci_slot": SLOT})
    assert shown["finished_at"] > shown["issued_at"]
    events = rack.office.ask("events.list", {"selector": "All"}, admin).body["events"]
    found = [one for one in events if one["action"].startswith("nodes.gpu_reset")]
    assert [one["action"] for one in found] == ["nodes.gpu_reset_done", "nodes.gpu_reset", "nodes.gpu_reset"]
    assert found[0]["detail"]["status"] == "Completed" and found[1]["detail"]["pci_slot"] == SLOT
    failed = reset(rack, people, node.node_id).body["command_id"]
    assert failed != command_id
    node.poll(command_results=[CommandResult(id=failed, ok=False, output="the GPU is in use")])
    assert [one["status"] for one in known(rack, people, node.node_id)] == ["Failed", "Completed"]


def test_a_gpu_that_somebody_has_is_not_reset(rack: Rack, ada: Caller) -> None:
    node, people = rack.node(gpus=1), rack.operator()
    mine = rack.rented(ada)
    refused = reset(rack, people, node.node_id)
    assert (refused.status, refused.code, refused.param) == (409, "NodeInUse", "pci_slot")
    assert refused.body["error"]["details"] == {"node_id": node.node_id, "holders": 1}
    node.bring_up(mine)
    rack.terminate(ada, mine)
    assert reset(rack, people, node.node_id).status == 409, "it is not gone yet"
    node.clean()
    assert reset(rack, people, node.node_id).status == 200


def test_who_may_have_which_gpu_reset(rack: Rack, ada: Caller) -> None:
    node, people, stranger = rack.node(gpus=1), rack.operator(), rack.office.person("provider")
    for slot in ("0000:99:00.0", "x"):
        wrong = reset(rack, people, node.node_id, slot)
        assert (wrong.status, wrong.code, wrong.param) == (400, "ValidationFailed", "pci_slot")
    foreign = reset(rack, stranger, node.node_id)
    assert (foreign.status, foreign.code, foreign.param) == (404, "NodeNotFound", "node_id")
    assert reset(rack, ada, node.node_id).status == 403
    node.leave()
    silent = reset(rack, people, node.node_id)
    assert (silent.status, silent.code) == (503, "NodeNotResponding")
    node.register()
    made = reset(rack, people, node.node_id)
    assert made.status == 200 and known(rack, stranger, node.node_id) == []


def test_a_reset_ends_with_the_session_or_the_time_that_it_was_asked_for_in(rack: Rack) -> None:
    node, people = rack.node(gpus=1), rack.operator()
    late = reset(rack, people, node.node_id).body["command_id"]
    rack.office.wait(601)
    assert node.poll().commands == []
    (shown,) = known(rack, people, node.node_id)
    assert (shown["id"], shown["status"], shown["output"]) == (late, "Lost", "The node did not tell of it in time.")
    assert reset(rack, people, node.node_id).body["command_id"] != late
    node.boot_id = "another"
    node.register()
    assert node.poll().commands == [], "the machine began anew: so did its GPUs"
    assert [one["status"] for one in known(rack, people, node.node_id)] == ["Lost", "Lost"]


def test_what_is_for_any_session_waits_for_the_next_one(rack: Rack) -> None:
    node, office = rack.node(gpus=1), rack.office
    with office.database.write() as unit:
        asked = commands.ask(unit, node.node_id, "sync_images", {}, now=office.clock(), random=office.random)
        assert commands.ask(unit, node.node_id, "sync_images", {}, now=office.clock(), random=office.random) == asked
    node.register()
    assert [one.id for one in node.poll().commands] == [asked]
