"""What compute promises, and the test that shows each promise: every operation of it, and every rule.

A rule that no test shows yet is in UNSHOWN. That set can only shrink: a rule that is in neither place, or in both, is
found here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from marketplace.operations import TABLE

HERE = Path(__file__).parent
RENT, LIFE = "instances/test_rent.py::test_", "instances/test_life.py::test_"
TERMS = "instances/test_terms.py::test_"
INSIDE, FLEET = "instances/test_inside.py::test_", "workers/test_fleet.py::test_"
QUOTA, COVER = "quotas/test_operations.py::test_", "quotas/test_coverage.py::test_"
RESERVE, HELD = "reservations/test_operations.py::test_", "reservations/test_service.py::test_"
NETWORK, RECIPE = "networks/test_operations.py::test_", "recipes/test_operations.py::test_"
VOLUME, KEEPER = "volumes/test_operations.py::test_", "volumes/test_keeper.py::test_"
ENVIRONMENT, METRICS = "environments/test_environments.py::test_", "nodes/test_metrics.py::test_"
CATALOG, CHOOSE = "catalog/test_operations.py::test_", "placement/test_choose.py::test_"
PRESET, KEY = "presets/test_operations.py::test_", "ssh_keys/test_operations.py::test_"
AGENT, RECONCILE = "agent/test_keeper.py::test_", "agent/test_reconcile.py::test_"
CLIENT, SEED, IMAGES = "agent/test_client.py::test_", "agent/test_seed.py::test_", "agent/test_images.py::test_"

_POWER = f"{LIFE}stop_start_pause_resume_and_reset_change_what_its_node_should_do"
_TYPES = f"{CATALOG}admins_add_change_and_remove_types_and_variants"
_LABELS = f"{RECIPE}groups_and_tags_are_kept_by_admins"
_FORCE = f"{FLEET}force_drain_ends_all_and_cancel_restores"
_DRAIN = f"{FLEET}a_drain_tells_everybody_once_ends_at_its_deadline_and_lets_nothing_in"
_FAILED = f"{LIFE}what_fails_costs_nothing_and_says_why"
_QUOTA = f"{QUOTA}life_of_a_quota"
_VOLUME = f"{VOLUME}life_of_a_volume"
_KEYS = f"{KEY}keys_are_kept_under_their_owner_s_name_and_forgotten"
_NETWORK = f"{NETWORK}a_network_is_added_shown_changed_and_removed"
_CUSTOM = f"{RENT}custom_shapes_are_for_those_who_may"
_SCOPES = f"{RENT}selectors_scopes_and_whose_instances_are_whose"
_REFUSED = f"{RENT}what_is_refused_changes_nothing"
_REGISTERED = f"{RENT}a_disabled_gpu_stays_so_when_its_node_registers_again"
_DRIVER = f"{INSIDE}a_catalog_image_whose_driver_the_gpus_cannot_load_is_refused"

OPERATIONS: dict[str, tuple[str, str]] = {
    "instances.rent": ("/api/v1/instances/rent", f"{RENT}renting_takes_money_for_an_hour_and_an_answer_is_repeated"),
    "instances.list": ("/api/v1/instances/list", _SCOPES),
    "instances.terminate": (
        "/api/v1/instances/terminate",
        f"{LIFE}a_machine_costs_exactly_the_time_from_ready_to_terminate",
    ),
    "instances.reset": ("/api/v1/instances/reset", _POWER),
    "instances.start": ("/api/v1/instances/start", _POWER),
    "instances.stop": ("/api/v1/instances/stop", _POWER),
    "instances.pause": ("/api/v1/instances/pause", _POWER),
    "instances.resume": ("/api/v1/instances/resume", _POWER),
    "instances.metrics": (
        "/api/v1/instances/metrics",
        f"{METRICS}a_renter_is_told_of_its_own_gpus_alone_since_they_are_its_own",
    ),
    "instances.saved_environments_list": (
        "/api/v1/instances/saved-environments/list",
        f"{ENVIRONMENT}what_is_shown",
    ),
    "instance_types.list": ("/api/v1/instance-types/list", f"{CATALOG}everybody_sees_what_is_free_where"),
    "instance_types.add": ("/api/v1/instance-types/add", _TYPES),
    "instance_types.update": ("/api/v1/instance-types/update", _TYPES),
    "instance_types.remove": ("/api/v1/instance-types/remove", _TYPES),
    "instance_types.add_variant": ("/api/v1/instance-types/add_variant", _TYPES),
    "instance_types.update_variant": ("/api/v1/instance-types/update_variant", _TYPES),
    "instance_types.remove_variant": ("/api/v1/instance-types/remove_variant", _TYPES),
    "instance_presets.list": (
        "/api/v1/instance-presets/list",
        f"{PRESET}a_shape_is_kept_once_for_each_person_and_forgotten",
    ),
    "instance_presets.delete": (
        "/api/v1/instance-presets/delete",
        f"{PRESET}a_shape_is_kept_once_for_each_person_and_forgotten",
    ),
    "reservations.create": (
        "/api/v1/reservations/create",
        f"{RESERVE}a_reservation_of_what_runs_is_charged_once_and_its_time_costs_nothing",
    ),
    "reservations.update": (
        "/api/v1/reservations/update",
        f"{RESERVE}a_reservation_is_made_longer_and_charged_for_it",
    ),
    "reservations.list": ("/api/v1/reservations/list", f"{RESERVE}a_team_s_reservations_are_its_members"),
    "reservations.types_list": ("/api/v1/reservations/types/list", f"{RESERVE}types_are_offered_and_taken_back"),
    "quotas.create": ("/api/v1/quotas/create", _QUOTA),
    "quotas.list": ("/api/v1/quotas/list", _QUOTA),
    "quotas.update": ("/api/v1/quotas/update", _QUOTA),
    "quotas.revoke": ("/api/v1/quotas/revoke", _QUOTA),
    "nodes.list": ("/api/v1/nodes/list", _REGISTERED),
    "nodes.metrics_list": (
        "/api/v1/nodes/metrics/list",
        f"{METRICS}the_latest_of_each_gpu_is_told_to_those_who_run_the_node",
    ),
    "nodes.drain": ("/api/v1/nodes/drain", _DRAIN),
    "nodes.force_drain": ("/api/v1/nodes/force_drain", _FORCE),
    "nodes.cancel_drain": ("/api/v1/nodes/cancel_drain", _FORCE),
    "nodes.resume": ("/api/v1/nodes/resume", _DRAIN),
    "nodes.set_marketplace_listing": ("/api/v1/nodes/set_marketplace_listing", _DRAIN),
    "nodes.delete": ("/api/v1/nodes/delete", _FORCE),
    "nodes.update": ("/api/v1/nodes/update", _REGISTERED),
    "networks.list": ("/api/v1/network/list", f"{NETWORK}selectors"),
    "networks.add": ("/api/v1/network/add", _NETWORK),
    "networks.update": ("/api/v1/network/update", _NETWORK),
    "networks.delete": ("/api/v1/network/delete", _NETWORK),
    "recipes.list": ("/api/v1/recipes/list", f"{RECIPE}recipes_belong_to_people_teams_providers_or_everybody"),
    "recipes.add": ("/api/v1/recipes/add", f"{RECIPE}what_a_recipe_cannot_be"),
    "recipes.remove": ("/api/v1/recipes/remove", f"{RECIPE}removed_by_name_tag_and_group_within_one_owner"),
    "recipes.update_vm_image": (
        "/api/v1/recipes/update_vm_image",
        f"{RECIPE}another_image_is_for_everybody_s_machines_and_nodes_are_asked_once_to_fetch_it",
    ),
    **{f"recipe_groups.{verb}": (f"/api/v1/recipes/groups/{verb}", _LABELS) for verb in ("add", "change", "remove")},
    **{f"recipe_tags.{verb}": (f"/api/v1/recipes/tags/{verb}", _LABELS) for verb in ("add", "change", "remove")},
    **{f"ssh_keys.{verb}": (f"/api/v1/ssh-keys/{verb}", _KEYS) for verb in ("add", "list", "delete")},
    **{
        f"{noun}.{verb}": (f"{path}/{verb}", f"{VOLUME}a_team_s_volumes" if noun == "team_volumes" else _VOLUME)
        for noun, path in (
            ("volumes", "/api/v1/volumes"),
            ("public_volumes", "/public/volumes"),
            ("team_volumes", "/public/team-volumes"),
        )
        for verb in ("list", "create", "update", "delete")
    },
}
"""By name: the path, and a test that uses it."""
BESIDE = frozenset(
    {
        "nodes.commands_list",
        "nodes.gpu_reset",
        "nodes.update_instance_type",
        "public_volumes.get",
        "reservations.types_add",
        "reservations.types_remove",
        "volumes.get",
        "volumes.types_add",
        "volumes.types_list",
        "volumes.types_remove",
    }
)
"""Operations beyond what is promised; the tests of their nouns use them."""
NOUNS = frozenset({name.partition(".")[0] for name in OPERATIONS})
OLDEST = {"instances.rent": "v062", "instances.list": "v061", "instances.terminate": "v061"}
"""The oldest version that an operation serves, where it is not the oldest of all."""

RULES: dict[str, tuple[str, ...]] = {
    # Instances
    "an instance without a name is given one, and its ports are published once": (
        f"{RENT}names_are_made_up_and_ports_are_published_once",
    ),
    "passwords are hidden unless they are asked for by somebody who may see them": (
        f"{RENT}secrets_are_shown_only_to_who_asks_and_may",
    ),
    "tags, clusters, statuses, people, nodes and teams select instances, each within its scope": (_SCOPES,),
    "the selector by team is of old versions only": (_SCOPES,),
    "providers end and see what is on their nodes, and nothing else of others": (_SCOPES,),
    "a failed instance says why, in words to act on, with an id; it costs nothing": (_FAILED,),
    "a failed instance is dismissed by terminating it": (_FAILED,),
    "a virtual machine costs from its readiness to the request to end it, to the unit": (
        f"{LIFE}a_machine_costs_exactly_the_time_from_ready_to_terminate",
        "agent/test_rental.py::test_a_virtual_machine_and_a_container_are_rented_reached_and_billed",
    ),
    "a container is active, and costs, from when it runs": (f"{LIFE}a_container_is_active_as_soon_as_it_runs",),
    "a machine that does not signal in time fails once it is gone, and costs nothing": (
        f"{FLEET}a_machine_that_does_not_signal_in_time_fails_once_it_is_taken_down",
    ),
    "pausing, stopping and starting change the machine and neither its claims nor its price": (_POWER,),
    "a guest that shuts itself down stays rented": (
        f"{LIFE}a_guest_that_shuts_itself_down_stays_rented_and_can_be_started",
    ),
    "a machine that vanished costs until it was last seen": (
        f"{LIFE}a_machine_that_vanished_twice_in_a_row_is_over_and_costs_until_it_was_last_seen",
    ),
    "what a person asks for again under one key is done once": (
        f"{RENT}renting_takes_money_for_an_hour_and_an_answer_is_repeated",
    ),
    "whoever cannot pay rents nothing, and what is no longer paid for ends after a grace": (
        f"{RENT}renting_takes_money_for_an_hour_and_an_answer_is_repeated",
        f"{FLEET}what_is_not_paid_for_longer_than_it_may_ends",
    ),
    "exempt rentals become active at once, count their time and cost nothing; only admins ask for them": (
        f"{FLEET}exempt_rentals_count_their_time_and_cost_nothing",
        _REFUSED,
    ),
    # Choosing a node
    "the node with the fewest free GPUs that fits is chosen; what does not fit says why": (
        f"{CHOOSE}the_node_with_the_fewest_free_gpus_that_fits_is_chosen",
        f"{RENT}the_fullest_node_is_taken_and_what_does_not_fit_says_why",
    ),
    "threads are dedicated, packed or shared; sharing needs node and variant to allow it": (
        f"{CHOOSE}dedicated_cores_are_whole_and_near_the_gpu",
        f"{CHOOSE}sharing_beyond_the_threads_needs_both_sides",
    ),
    "the shared policy is for slices of GPUs alone": (f"{CATALOG}what_a_variant_cannot_be", _CUSTOM),
    "memory comes from the pages of the nodes that its threads are on": (
        f"{CHOOSE}memory_comes_in_pages_of_the_numa_nodes_that_the_threads_are_on",
    ),
    "GPUs behind a switch are handed on in aligned sets": (f"{CHOOSE}a_board_with_a_switch_hands_on_aligned_sets",),
    "slices go to split GPUs first": (f"{CHOOSE}mig_goes_to_split_gpus_first_and_never_below_a_whole_one",),
    "broken and switched-off GPUs are not rented; one that is switched off stays so when its node registers again": (
        f"{CHOOSE}broken_and_disabled_gpus_are_never_handed_on",
        _REGISTERED,
    ),
    "no GPU has two owners, whoever asks at the same time": (f"{RENT}clients_at_once_never_have_the_same_gpu",),
    "an image whose drivers the GPUs cannot load is refused; untagged and custom images are not judged": (
        f"{CHOOSE}drivers_of_an_image_must_load",
        _DRIVER,
    ),
    "a node whose allocation of threads is changing says so, and when to ask again": (
        f"{FLEET}a_mixed_node_is_503_for_a_while",
    ),
    "admins choose threads and GPUs themselves, and nobody else does": (
        f"{CHOOSE}people_may_name_gpus_and_threads",
        _REFUSED,
    ),
    "shapes of one's own are for operators and holders, say their policy, and are off unless a setting says so": (
        _CUSTOM,
    ),
    "a shape of one's own is priced by the weights that the node's list shows": (_CUSTOM,),
    "a shape of one's own is remembered once for its person, and no request takes it from there": (
        f"{INSIDE}a_shape_of_one_s_own_is_remembered_once",
        f"{PRESET}no_operation_makes_or_takes_one",
    ),
    # Quotas
    "holders rent on their nodes alone, covered whole or refused": (
        f"{CHOOSE}a_holder_is_covered_or_rejected_and_never_split",
    ),
    "others get what no quota holds, and are told how much that is": (
        f"{CHOOSE}others_get_what_no_quota_holds_where_they_name_the_node",
        f"{COVER}others_get_what_no_quota_holds",
    ),
    "what must be covered and is not is refused": (_REFUSED,),
    "a quota of nothing is refused, and none is larger than what its node has free": (
        f"{QUOTA}a_quota_of_nothing_is_refused",
        f"{QUOTA}a_quota_is_never_larger_than_what_its_node_has_for_it",
    ),
    "a node without a usable disk grants none": (f"{QUOTA}a_node_without_a_usable_disk_grants_none",),
    "covered time costs nothing and is counted; from the quota's end it costs": (
        f"{COVER}covered_time_costs_nothing_and_is_counted",
        f"{COVER}what_ran_under_a_quota_costs_from_its_end",
    ),
    "quotas are given by admins and by the node's provider, to teams by id or name and to people": (
        f"{QUOTA}providers_give_what_is_theirs_to_whom_they_know",
    ),
    # Reservations
    "money of a reservation is held, charged once it runs, and returned where it never does": (
        f"{HELD}money_is_held_until_it_runs_and_charged_then",
        f"{HELD}what_never_runs_costs_nothing",
    ),
    "the same money buys one reservation, whoever asks at the same time": (
        f"{RESERVE}of_those_who_reserve_one_instance_at_once_one_pays",
        f"{RESERVE}the_same_money_buys_one_reservation",
    ),
    "an exempt reservation costs nothing": (f"{RESERVE}what_an_exempt_reservation_covers_costs_nothing_at_all",),
    "what was paid is used again while it lasts, a shape of one's own where it was made": (
        f"{HELD}what_was_paid_is_used_again_while_it_lasts",
        f"{HELD}a_reservation_of_a_shape_is_used_again_where_it_was_made",
    ),
    # Networks
    "names of networks are for those who may use them, everything else for operators": (
        f"{NETWORK}renters_see_names_of_public_networks_and_of_their_teams",
    ),
    "a renter's networks leave out those of other teams, even for admins": (f"{NETWORK}selectors",),
    "operators manage their own datacenters, admins all": (
        f"{NETWORK}operators_manage_their_own_datacenters_and_nobody_elses",
    ),
    "the gateway is optional": (f"{NETWORK}the_gateway_is_optional_and_a_name_is_free_again_once_its_network_is_gone",),
    "a proxy's address has no credentials in it": (f"{NETWORK}what_is_refused_names_the_field",),
    "instances that are over are not listed in networks": (f"{NETWORK}instances_that_are_over_are_not_in_a_network",),
    "addresses are given once, whoever asks at the same time": (
        f"{NETWORK}of_many_who_join_at_once_each_has_an_address_of_its_own",
    ),
    "machines of a network get its proxy for packages, containers and curl": (
        f"{INSIDE}a_machine_in_a_network_has_its_address_and_its_way_out_until_it_is_over",
        f"{SEED}the_networks_proxy_reaches_apt_the_container_daemon_its_client_and_curl",
    ),
    "a team's network is for its members": (f"{INSIDE}a_team_s_network_is_for_its_members",),
    # Volumes and saved environments
    "a volume outlives its instances and is attached to one at a time": (
        f"{VOLUME}a_volume_is_attached_to_one_instance_on_one_node",
    ),
    "a volume says all datacenters that it is in, and the first of them": (_VOLUME,),
    "a volume costs exactly its time; an exempt one is kept whatever the balance": (
        f"{KEEPER}a_volume_costs_exactly_its_time_however_often_it_is_charged",
        f"{KEEPER}exempt_and_free_volumes_are_never_deleted",
    ),
    "a saved environment is shown while its disk exists, to its owner": (
        f"{ENVIRONMENT}what_is_shown",
        f"{ENVIRONMENT}a_disk_that_vanished_is_not_offered",
    ),
    "a disk that is gone is refused with a reason": (_REFUSED, f"{ENVIRONMENT}a_disk_that_vanished_is_not_offered"),
    "a disk is used by one at a time, and comes back when that fails": (
        f"{ENVIRONMENT}one_at_a_time_uses_a_disk",
        f"{ENVIRONMENT}a_disk_comes_back_when_its_use_failed",
    ),
    "disks are kept for their grace and erased after it, or at once": (
        f"{AGENT}a_disk_is_erased_when_its_grace_is_over",
        f"{AGENT}a_grace_of_zero_keeps_no_disk",
    ),
    # Nodes
    "a node that is being emptied is hidden, takes nothing new, and its users are told once": (_DRAIN,),
    "what still runs when a drain's grace is over is ended": (_DRAIN,),
    "a node that is being emptied cannot be listed": (_DRAIN,),
    "nodes are deleted by admins alone": (_FORCE,),
    "an unreachable node stops costing": (f"{FLEET}ticks_charge_up_to_the_last_sign_of_life_and_once",),
    "what starts on a node that is lost fails, and its claim waits for the node": (
        f"{FLEET}what_starts_on_a_node_that_is_lost_fails_and_its_claim_waits_for_the_node",
    ),
    "nodes sign in with a key from the environment or a file; older ways work, with a warning": (
        f"{CLIENT}the_environment_wins_over_the_file",
        f"{CLIENT}every_kind_of_credentials_file_loads_and_is_left_as_it_is",
        f"{CLIENT}a_password_becomes_a_token_and_each_registration_warns",
    ),
    "strays are touched after their age, two looks and the server's word": (
        f"{RECONCILE}a_stray_needs_age_two_rounds_and_the_servers_word",
    ),
    "machines keep running while the server is gone": (f"{AGENT}machines_keep_running_when_the_server_is_gone",),
    "an image that cannot be fetched fails its rental with a reason": (
        f"{IMAGES}an_address_that_does_not_serve_an_image_is_explained_without_its_secrets",
    ),
    "nodes keep the images ready whose drivers they load, where the setting says so": (
        f"{RECIPE}nodes_keep_images_ready_filtered_by_driver_tags_where_the_setting_says_so",
    ),
    "measurements of GPUs and slices are for whoever has them": (
        f"{METRICS}who_has_a_mig_instance_is_told_of_that_one",
    ),
    # Recipes, presets, keys
    "recipes belong to people, teams, providers or everybody, and are seen accordingly": (
        f"{RECIPE}recipes_belong_to_people_teams_providers_or_everybody",
    ),
    "everybody's machines name an image, and admins replace it": (
        f"{RECIPE}what_a_recipe_cannot_be",
        f"{RECIPE}another_image_is_for_everybody_s_machines_and_nodes_are_asked_once_to_fetch_it",
    ),
    "keys are given to machines by name, by id or written out": (
        f"{INSIDE}keys_are_given_by_name_by_id_or_written_out",
    ),
    # The whole
    "a request pinned to an older version than is served is refused": (
        "test_operations.py::test_a_version_older_than_it_serves_is_400",
    ),
    "who may do what is written down": ("users/test_permissions.py::test_rights_are_as_they_were_written_down",),
    "nobody who has machines running is erased": (
        "users/test_erasure.py::test_whoever_has_something_running_is_protected",
    ),
    "the catalog says what is free in which datacenter, of whom, in which country, and whether addresses are public": (
        f"{CATALOG}everybody_sees_what_is_free_where",
    ),
    "settings of the platform are read again by admins alone": (
        "users/test_permissions.py::test_rights_are_as_they_were_written_down",
    ),
    "the catalog's public addresses are those of networks for everybody": (
        f"{CATALOG}public_addresses_are_told_where_a_network_for_everybody_has_them",
    ),
    "the list of nodes has capacities, what is free by the policy of threads, and the weights of prices": (
        "nodes/test_listing.py::test_capacities_weights_and_what_is_free",
    ),
    "providers list their own nodes, admins those of whom they choose": (
        "nodes/test_listing.py::test_providers_see_their_own_and_admins_choose_whose",
    ),
    "the memory of a machine is live in lists": ("nodes/test_listing.py::test_memory_of_a_machine_is_live",),
    "readiness is told until the server takes it": (
        "agent/test_node.py::test_readiness_is_told_until_the_server_takes_it_and_then_never_again",
    ),
    "a low balance is told once": ("workers/test_funds.py::test_a_fall_is_told_once_and_again_only_after_a_rise",),
    "the tools of language models are rows of the table": (
        "http/test_mcp.py::test_tools_are_the_table_s_rows_with_their_schemas_and_hints",
    ),
    "holders rent end to end on what they hold, and others on what is left": (
        f"{TERMS}who_holds_an_allocation_rents_on_it_and_nowhere_else",
        f"{TERMS}others_rent_what_allocations_leave",
    ),
    "a saved disk is rented again by its owner, on its node, by one": (f"{TERMS}a_saved_disk_is_used_again_by_one",),
    "only admins rent and reserve for nothing": (f"{TERMS}only_admins_rent_and_reserve_for_nothing",),
    "mistakes that such systems made before are tested": (
        "life/test_shipped_bugs.py::test_the_tests_of_a_mistake_exist",
    ),
    "a command that a container cannot run, or that ends at once, fails it with a reason, over REST": (
        "agent/test_rental.py::test_a_virtual_machine_and_a_container_are_rented_reached_and_billed",
    ),
    "whoever asks for instances may wait for news of them": (
        "instances/test_waiting.py::test_the_answer_comes_with_the_news",
    ),
    "a recipe says what a machine begins from, unless its renter does": (
        f"{INSIDE}a_recipe_says_what_a_machine_begins_from_unless_the_renter_does",
    ),
    "a mask says what is told; how to reach a machine is not a secret, its password is": (
        "instances/test_masks.py::test_a_mask_says_what_of_an_instance_is_told",
    ),
    "renters, the node's operators and admins act on a machine, and nobody else": (
        "instances/test_masks.py::test_renters_operators_and_admins_act_on_a_machine_and_nobody_else",
    ),
    "reservations tell nothing of modes of nodes": (
        "instances/test_masks.py::test_reservations_tell_nothing_of_modes_of_nodes",
    ),
    "a slice of a GPU is named by the instance of its own profile": (
        f"{INSIDE}a_slice_is_named_by_the_instance_of_its_profile_that_begins_there",
    ),
    "keys that are written out are checked like those that are kept": (f"{INSIDE}written_out_keys_are_public_keys",),
    "nothing that somebody wrote about their machines is left once they are erased": (
        "users/test_erasure_rentals.py::test_nothing_that_somebody_who_rented_wrote_is_left_anywhere",
    ),
}
UNSHOWN: frozenset[str] = frozenset()


def _named() -> list[str]:
    return sorted({*(test for _, test in OPERATIONS.values()), *(test for tests in RULES.values() for test in tests)})


@cache
def _tests_of(path: str) -> frozenset[str]:
    found = (HERE / path).read_text()
    return frozenset(node.name for node in ast.parse(found).body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("test", _named())
def test_the_test_that_a_promise_names_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert (HERE / path).is_file(), f"there is no {path}"
    assert name in _tests_of(path), f"{path} has no {name}"


def test_every_operation_of_compute_is_promised_and_there() -> None:
    rows = {operation.name: operation for operation in TABLE}
    for name, (path, _) in OPERATIONS.items():
        assert name in rows, f"there is no operation {name}"
        assert (rows[name].path, rows[name].method) == (path, "POST"), name
        assert rows[name].versions[0] == OLDEST.get(name, "v045"), name
    compute = {name for name in rows if name.partition(".")[0] in NOUNS}
    assert compute - OPERATIONS.keys() == BESIDE


def test_what_no_test_shows_only_becomes_less() -> None:
    unshown = {rule for rule, tests in RULES.items() if not tests}
    print(f"{len(unshown)} of {len(RULES)} rules have no test: {sorted(unshown)}")
    assert unshown == UNSHOWN
