"""How payments are made here: through Stripe where its secrets are in the environment, by hand where they are not."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from gateway.settings import SettingError
from marketplace.payments.manual import ManualProvider
from marketplace.payments.port import PaymentProvider

SECRET_KEY = "HEADRACE_STRIPE_SECRET_KEY"
WEBHOOK_SECRET = "HEADRACE_STRIPE_WEBHOOK_SECRET"
API_BASE = "HEADRACE_STRIPE_API_BASE"
"""Another address than Stripe's own: a server that stands in for it."""
_SAFE_BASE = re.compile(r"https://[A-Za-z0-9.\[\]:-]+|http://(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?")


def payments_of(environment: MutableMapping[str, str]) -> PaymentProvider:
    """Return the payment provider of an environment. The secrets are taken out of it: processes that are started from
    here do not inherit them. SettingError, which repeats no secret."""
    secret_key, webhook_secret, base = (environment.pop(name, "") for name in (SECRET_KEY, WEBHOOK_SECRET, API_BASE))
    if not secret_key and not webhook_secret:
        return ManualProvider()
    if not secret_key or not webhook_secret:
        there, missing = (SECRET_KEY, WEBHOOK_SECRET) if secret_key else (WEBHOOK_SECRET, SECRET_KEY)
        raise SettingError(f"{there} is given without {missing}: payments through Stripe need both")
    if base and not _SAFE_BASE.fullmatch(base):
        raise SettingError(f"{API_BASE} must be an https address without a path, or one of this machine")
    try:
        from marketplace.payments.stripe_provider import StripeProvider
    except ModuleNotFoundError as error:
        if error.name != "stripe":
            raise
        raise SettingError(
            f"{SECRET_KEY} is given but Stripe's library is not: pip install 'headrace[payments]'"
        ) from None
    return StripeProvider(secret_key, webhook_secret, api_base=base or None)
