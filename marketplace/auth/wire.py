"""Requests and answers of signing in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, RootModel, StringConstraints

from marketplace.http.wire import Instant, Wire
from marketplace.notify.rules import mail_address
from marketplace.users.rules import MAX_EMAIL, MAX_PASSWORD, MIN_PASSWORD
from marketplace.users.wire import Name


def _mailable(email: str) -> str:
    mail_address(email)
    return email


MailAddress = Annotated[str, StringConstraints(min_length=3, max_length=MAX_EMAIL), AfterValidator(_mailable)]
"""An address that mail can go to."""
NewPassword = Annotated[str, StringConstraints(min_length=MIN_PASSWORD, max_length=MAX_PASSWORD)]
EmailToken = Annotated[str, StringConstraints(min_length=1, max_length=200)]
TotpCode = Annotated[str, StringConstraints(pattern=r"^[0-9]{6}$")]


class LoginRequest(Wire):
    """Credentials of a person."""

    email: Annotated[str, StringConstraints(min_length=1, max_length=MAX_EMAIL)]
    password: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PASSWORD)]


class RegisterRequest(Wire):
    """Somebody who wants an account."""

    name: Name
    email: MailAddress
    password: NewPassword


class EmailRequest(Wire):
    """An address that a mail should go to."""

    email: MailAddress


class AcceptedAnswer(Wire):
    """It was accepted. What happens now is for the owner of the address to see, in their mail."""

    accepted: bool


class VerifyRequest(Wire):
    """The token of the link in the mail."""

    token: EmailToken


class VerifiedAnswer(Wire):
    """The address is theirs; they can sign in."""

    verified: bool


class ResetRequest(Wire):
    """The token of the link in the mail, and the password to have from now on."""

    token: EmailToken
    password: NewPassword


class ResetAnswer(Wire):
    """The password is the new one; every session was ended."""

    reset: bool


class SessionAnswer(Wire):
    """A session token; it lives 30 days."""

    token: str
    expires_at: Instant


class PartialAnswer(Wire):
    """The second factor is still to come: send this to totp/complete within five minutes."""

    partial_token: str


class LoginAnswer(RootModel[SessionAnswer | PartialAnswer]):
    """A session, or the first half of one."""


class CodeRequest(Wire):
    """The six digits that the authenticator app shows now."""

    code: TotpCode


class CompleteRequest(Wire):
    """The first half of a login, and the code that makes it whole."""

    partial_token: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    code: TotpCode


class TotpSetupAnswer(Wire):
    """A new secret, for an authenticator app; shown once."""

    secret: str
    totp_uri: str


class TotpStateAnswer(Wire):
    """Whether the second factor is on."""

    totp_enabled: bool


class MeAnswer(Wire):
    """Who the caller is. For a team's key: the team."""

    id: str
    email: str | None
    name: str
    role: Literal["admin", "readonly_admin", "provider", "user"] | None
    provider: str
    """the caller's compute provider, or the platform"""
    auth_provider: str
    """how the caller signs in: Password, the name of an issuer, or None"""
    totp_enabled: bool
    created_at: Instant | None
    last_login_at: Instant | None
    principal: dict[Literal["User", "Team"], str]


class CapabilitiesAnswer(Wire):
    """What the caller may do, as noun and verb; what is not named is not allowed."""

    features: list[dict[str, dict[str, bool]]] = Field(examples=[[{"keys": {"read": True}}]])
    is_admin: bool
    provider_name: str | None
