"""What each role may do, pure. Permissions are named noun.verb; `capabilities/list` shows them in this form."""

from __future__ import annotations

from enum import StrEnum

from marketplace.users.rules import Role


class Permission(StrEnum):
    """One thing that a caller may be allowed to do."""

    AUTH_SELF = "auth.self"
    TOTP_MANAGE = "totp.manage"
    KEYS_READ = "keys.read"
    KEYS_WRITE = "keys.write"
    KEYS_NODE = "keys.node"
    KEYS_SERVICE = "keys.service"
    TEAMS_READ = "teams.read"
    TEAMS_WRITE = "teams.write"
    TEAMS_SEARCH = "teams.search"
    TEAMS_READ_ALL = "teams.read_all"
    TEAMS_WRITE_ALL = "teams.write_all"
    ACCOUNT_READ = "account.read"
    ACCOUNT_READ_ALL = "account.read_all"
    ACCOUNT_ADJUST = "account.adjust"
    USERS_READ = "users.read"
    USERS_READ_ALL = "users.read_all"
    USERS_MESSAGE = "users.message"
    USERS_ADD = "users.add"
    USERS_ROLE = "users.update_role"
    USERS_DELETE = "users.delete"
    PROVIDERS_READ = "providers.read"
    PROVIDERS_READ_ALL = "providers.read_all"
    PROVIDERS_WRITE = "providers.write"
    CATALOG_WRITE = "instance_types.write"
    NODES_READ = "nodes.read"
    NODES_READ_ALL = "nodes.read_all"
    NODES_WRITE = "nodes.write"
    NODES_DELETE = "nodes.delete"
    INSTANCES_READ = "instances.read"
    INSTANCES_READ_ALL = "instances.read_all"
    INSTANCES_RENT = "instances.rent"
    INSTANCES_WRITE = "instances.write"
    INSTANCES_WRITE_ALL = "instances.write_all"
    INSTANCES_VIEW_CREDENTIALS = "instances.view_credentials"
    QUOTAS_READ = "quotas.read"
    QUOTAS_READ_ALL = "quotas.read_all"
    QUOTAS_WRITE = "quotas.write"
    RESERVATIONS_READ = "reservations.read"
    RESERVATIONS_READ_ALL = "reservations.read_all"
    RESERVATIONS_WRITE = "reservations.write"
    RESERVATIONS_TYPES = "reservations.types"
    VOLUMES_READ = "volumes.read"
    VOLUMES_WRITE = "volumes.write"
    VOLUMES_TYPES = "volumes.types"
    NETWORKS_READ = "networks.read"
    NETWORKS_READ_ALL = "networks.read_all"
    NETWORKS_WRITE = "networks.write"
    RECIPES_READ = "recipes.read"
    RECIPES_WRITE = "recipes.write"
    RECIPES_WRITE_ALL = "recipes.write_all"
    SSH_KEYS_READ = "ssh_keys.read"
    SSH_KEYS_WRITE = "ssh_keys.write"
    PAYMENTS_READ = "payments.read"
    PAYMENTS_CREATE = "payments.create"
    PAYMENTS_READ_ALL = "payments.read_all"
    PAYMENTS_SETTLE = "payments.settle"
    SERVICES_CHARGE = "services.charge"
    APP_SETTINGS_READ = "app_settings.read"
    APP_SETTINGS_WRITE = "app_settings.write"
    APP_SETTINGS_REFRESH = "app_settings.refresh"
    EVENTS_READ = "events.read"
    EVENTS_READ_ALL = "events.read_all"


_OWN = frozenset(
    {
        Permission.AUTH_SELF,
        Permission.TOTP_MANAGE,
        Permission.KEYS_READ,
        Permission.KEYS_WRITE,
        Permission.QUOTAS_READ,
        Permission.RESERVATIONS_READ,
        Permission.RESERVATIONS_WRITE,
        Permission.VOLUMES_READ,
        Permission.VOLUMES_WRITE,
        Permission.TEAMS_READ,
        Permission.TEAMS_WRITE,
        Permission.ACCOUNT_READ,
        Permission.PAYMENTS_READ,
        Permission.PAYMENTS_CREATE,
        Permission.EVENTS_READ,
        Permission.INSTANCES_READ,
        Permission.INSTANCES_RENT,
        Permission.INSTANCES_WRITE,
        Permission.NETWORKS_READ,
        Permission.RECIPES_READ,
        Permission.RECIPES_WRITE,
        Permission.SSH_KEYS_READ,
        Permission.SSH_KEYS_WRITE,
    }
)
_SEE_ALL = frozenset(
    {
        Permission.APP_SETTINGS_READ,
        Permission.QUOTAS_READ_ALL,
        Permission.RESERVATIONS_READ_ALL,
        Permission.PAYMENTS_READ_ALL,
        Permission.ACCOUNT_READ_ALL,
        Permission.EVENTS_READ_ALL,
        Permission.TEAMS_SEARCH,
        Permission.TEAMS_READ_ALL,
        Permission.USERS_READ,
        Permission.USERS_READ_ALL,
        Permission.PROVIDERS_READ,
        Permission.PROVIDERS_READ_ALL,
        Permission.NODES_READ,
        Permission.NETWORKS_READ_ALL,
        Permission.NODES_READ_ALL,
        Permission.INSTANCES_READ_ALL,
    }
)
_SECRETS = frozenset({Permission.INSTANCES_VIEW_CREDENTIALS})
_PROVIDE = frozenset(
    {
        Permission.KEYS_NODE,
        Permission.QUOTAS_WRITE,
        Permission.VOLUMES_TYPES,
        Permission.TEAMS_SEARCH,
        Permission.USERS_READ,
        Permission.USERS_MESSAGE,
        Permission.USERS_ADD,
        Permission.PROVIDERS_READ,
        Permission.NODES_READ,
        Permission.NODES_WRITE,
        Permission.NETWORKS_WRITE,
    }
)

OF_ROLE: dict[Role, frozenset[Permission]] = {
    "user": _OWN | _SECRETS,
    "provider": _OWN | _SECRETS | _PROVIDE,
    "readonly_admin": _OWN | _SEE_ALL,
    "admin": frozenset(Permission),
}
"""Everybody looks after what is their own; a provider also sees its people and customers; a read-only admin sees what
is others', but no passwords of machines, and changes nothing there."""

OF_TEAM_KEY = frozenset(
    {
        Permission.AUTH_SELF,
        Permission.QUOTAS_READ,
        Permission.RESERVATIONS_READ,
        Permission.RESERVATIONS_WRITE,
        Permission.VOLUMES_READ,
        Permission.VOLUMES_WRITE,
        Permission.TEAMS_READ,
        Permission.ACCOUNT_READ,
        Permission.PAYMENTS_READ,
        Permission.PAYMENTS_CREATE,
        Permission.EVENTS_READ,
        Permission.INSTANCES_READ,
        Permission.INSTANCES_RENT,
        Permission.INSTANCES_WRITE,
        Permission.NETWORKS_READ,
        Permission.RECIPES_READ,
        Permission.RECIPES_WRITE,
        Permission.SSH_KEYS_READ,
        Permission.SSH_KEYS_WRITE,
        Permission.INSTANCES_VIEW_CREDENTIALS,
    }
)
"""A team's key speaks for the team, not for one of its people."""

OF_SERVICE_KEY = frozenset({Permission.SERVICES_CHARGE})
"""A service charges for what others used of it, and does nothing else."""
