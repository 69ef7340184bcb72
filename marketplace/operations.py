"""THE TABLE: every management operation, once. Routes, the OpenAPI document and the test that walks every row are made
from it; an operation that is not in it does not exist."""

from __future__ import annotations

from typing import Any

from marketplace.accounts import export
from marketplace.accounts import operations as accounts
from marketplace.auth import oauth_operations, onboarding
from marketplace.auth import operations as auth
from marketplace.catalog import operations as catalog
from marketplace.environments import operations as environments
from marketplace.events import operations as events
from marketplace.http.operation import Operation
from marketplace.instances import operations as instances
from marketplace.keys import operations as keys
from marketplace.networks import operations as networks
from marketplace.nodes import command_operations as commands
from marketplace.nodes import metrics_operations as metrics
from marketplace.nodes import operations as nodes
from marketplace.payments import operations as payments
from marketplace.presets import operations as presets
from marketplace.providers import operations as providers
from marketplace.quotas import operations as quotas
from marketplace.recipes import operations as recipes
from marketplace.reservations import operations as reservations
from marketplace.services import operations as services
from marketplace.settings import operations as settings
from marketplace.ssh_keys import operations as ssh_keys
from marketplace.teams import operations as teams
from marketplace.users import operations as users
from marketplace.volumes import operations as volumes

TABLE: tuple[Operation[Any], ...] = (
    *auth.OPERATIONS,
    *onboarding.OPERATIONS,
    *oauth_operations.OPERATIONS,
    *keys.OPERATIONS,
    *teams.OPERATIONS,
    *accounts.OPERATIONS,
    *export.OPERATIONS,
    *users.OPERATIONS,
    *providers.OPERATIONS,
    *catalog.OPERATIONS,
    *nodes.OPERATIONS,
    *commands.OPERATIONS,
    *instances.OPERATIONS,
    *payments.OPERATIONS,
    *services.OPERATIONS,
    *quotas.OPERATIONS,
    *reservations.OPERATIONS,
    *volumes.OPERATIONS,
    *environments.OPERATIONS,
    *metrics.OPERATIONS,
    *networks.OPERATIONS,
    *presets.OPERATIONS,
    *recipes.OPERATIONS,
    *ssh_keys.OPERATIONS,
    *settings.OPERATIONS,
    *events.OPERATIONS,
)
