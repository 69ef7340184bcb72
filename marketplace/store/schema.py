"""Imports every noun's tables, so that `metadata` is the whole schema: what migrations are compared with."""

from __future__ import annotations

import marketplace.auth.oauth_tables
import marketplace.auth.tables
import marketplace.catalog.tables
import marketplace.environments.tables
import marketplace.events.tables
import marketplace.http.tables
import marketplace.instances.tables
import marketplace.keys.tables
import marketplace.ledger.rental_tables
import marketplace.ledger.tables
import marketplace.networks.tables
import marketplace.nodes.tables
import marketplace.notify.tables
import marketplace.payments.tables
import marketplace.placement.tables
import marketplace.presets.tables
import marketplace.providers.tables
import marketplace.quotas.tables
import marketplace.recipes.tables
import marketplace.reservations.tables
import marketplace.services.tables
import marketplace.settings.tables
import marketplace.ssh_keys.tables
import marketplace.store.epochs
import marketplace.teams.tables
import marketplace.users.tables
import marketplace.volumes.tables  # noqa: F401
from marketplace.store.base import metadata

__all__ = ["metadata"]
