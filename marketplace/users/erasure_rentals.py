"""What somebody's machines leave behind goes with them: what they were called, what was in them, their disks, and
allocations. That there were so many, of which shape, for how long and at what price, stays."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import case, delete, null, or_, select, update

from marketplace.environments import service as environments
from marketplace.environments.tables import saved_environment
from marketplace.events.transitions import Scene
from marketplace.instances.specs import Config
from marketplace.instances.tables import instance, instance_tag
from marketplace.ledger.rental_tables import rental_meter
from marketplace.quotas import grants
from marketplace.quotas.tables import quota
from marketplace.store.db import WriteUnit
from marketplace.volumes.tables import volume, volume_attachment


def forget(unit: WriteUnit, user_id: str, account_ids: Sequence[str], scene: Scene) -> dict[str, int]:
    """Clear what the machines of these accounts tell of their owner, none of which runs any more, and of ended machines
    of other accounts what the person put into them; returns how many rows, by kind.

    Locks nodes: before whatever locks accounts.
    """
    taken_back = _revoke(unit, account_ids, scene)
    kept = environments.abandon(unit, account_ids, scene)
    mine = instance.c.account_id.in_(account_ids)
    tags = delete(instance_tag).where(instance_tag.c.instance_id.in_(select(instance.c.id).where(mine)))
    counts = {"saved_environments": kept, "allocations": taken_back, "instance_tags": unit.execute(tags).rowcount}
    unit.execute(
        update(instance)
        .where(mine)
        .values(
            name=instance.c.id,
            cluster_name="default",
            config=_text(Config()),
            secret=None,
            username="",
            addresses="[]",
            failure_message=case((instance.c.failure_id.is_(None), null()), else_=""),
            readiness_digest=None,
        )
    )
    _forget_at_teams(unit, user_id, account_ids)
    cleared = {"name": saved_environment.c.id, "os_label": ""}
    unit.execute(update(saved_environment).where(saved_environment.c.account_id.in_(account_ids)).values(**cleared))
    named = {"resource_name": rental_meter.c.resource_id}
    unit.execute(update(rental_meter).where(rental_meter.c.account_id.in_(account_ids)).values(**named))
    theirs = select(volume.c.id).where(volume.c.account_id.in_(account_ids))
    unit.execute(update(volume_attachment).where(volume_attachment.c.volume_id.in_(theirs)).values(mount_path="/"))
    return counts


def _revoke(unit: WriteUnit, account_ids: Sequence[str], scene: Scene) -> int:
    """Nobody is left to use what they were given of nodes: it is free for others again."""
    mine = quota.c.account_id.in_(account_ids)
    given = select(quota.c.id, quota.c.node_id).where(mine, quota.c.active).order_by(quota.c.node_id, quota.c.id)
    found = sum(grants.revoke(unit, row.id, row.node_id, scene.now) for row in unit.select(given).all())
    unit.execute(update(quota).where(mine).values(name=quota.c.id))
    return found


def _forget_at_teams(unit: WriteUnit, user_id: str, account_ids: Sequence[str]) -> None:
    """Their keys, and what is sealed, leave what they rented for teams that go on, where it is over. The rest of it is
    the team's."""
    wanted = select(instance.c.id, instance.c.config).where(
        instance.c.user_id == user_id,
        instance.c.account_id.not_in(account_ids),
        instance.c.ended_at.is_not(None),
        or_(instance.c.secret.is_not(None), instance.c.ssh_key_auth),
    )
    for row in unit.select(wanted).all():
        config = msgspec.structs.replace(msgspec.json.decode(row.config, type=Config), ssh_keys=[])
        values = {"config": _text(config), "secret": None, "ssh_key_auth": False}
        unit.execute(update(instance).where(instance.c.id == row.id).values(**values))


def _text(config: Config) -> str:
    return msgspec.json.encode(config).decode()
