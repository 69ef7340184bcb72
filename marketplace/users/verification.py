"""The moment at which an address is known to be a person's, and what it brings with it."""

from __future__ import annotations

from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random
from marketplace.teams import service as teams
from marketplace.users import bonus
from marketplace.users import service as users
from marketplace.users.service import User


def confirm(unit: WriteUnit, user: User, *, now: int, random: Random) -> bool:
    """Take a person's address for theirs: they are given the signup bonus and join the teams that invited them.

    All of it once: False, and nothing is done, when it was known before.
    """
    if not users.mark_verified(unit, user.id, now):
        return False
    teams.join_by_invites(unit, user, now=now, random=random)
    bonus.grant_once(unit, user, now=now, random=random)
    return True
