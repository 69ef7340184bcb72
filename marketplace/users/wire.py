"""Requests and answers about people."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, StringConstraints

from marketplace.accounts.wire import AccountSummary
from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CentsIn, CursorText, Id, Instant, Limit, Wire
from marketplace.users.rules import MAX_EMAIL, Role

MAX_SELECTED = 1000
"""Most people whom one message goes to."""
MAX_NAME = 128
MAX_SUBJECT = 200
MAX_MESSAGE = 20_000


def _one_line(text: str) -> str:
    # A line break here would be another header of the mail.
    if not text.isprintable() or not text.strip():
        raise ValueError("one line of printable characters")
    return text


def _text(text: str) -> str:
    if not text.strip() or any(not (char.isprintable() or char in "\n\t") for char in text.replace("\r\n", "\n")):
        raise ValueError("printable text")
    return text


def _not_negative(amount: int) -> int:
    if amount < 0:
        raise ValueError("it is not negative")
    return amount


Ids = Annotated[list[Id], Field(min_length=1, max_length=MAX_SELECTED)]
Email = Annotated[str, StringConstraints(min_length=3, max_length=MAX_EMAIL)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME), AfterValidator(_one_line)]
ProviderName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
Amount = Annotated[CentsIn, AfterValidator(_not_negative)]


class ById(Wire):
    """People, by id; those who are not there, or may not be seen, are absent from the answer."""

    ids: Ids = Field(alias="ById", validation_alias=AliasChoices("ById", "ByID"))


class ByProvider(Wire):
    """The people and customers of a provider, by its name."""

    provider: ProviderName = Field(alias="ByProvider")


class ByMinSpend(Wire):
    """Whoever spent at least so much, in cents."""

    amount: Amount = Field(alias="ByMinSpend")


Selector = Literal["All", "ByActiveExecutors"] | ById | ByProvider | ByMinSpend
"""ByActiveExecutors: whoever has machines running."""


class ListRequest(Wire):
    """A page of people, newest first. Providers see their own people and customers only."""

    selector: Selector = "All"
    with_account_info: bool = False
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class UserAnswer(Wire):
    """A person."""

    id: str
    email: str
    name: str
    role: Role
    registered_at: Instant
    last_login_at: Instant | None
    account_info: AccountSummary | None
    """null unless it was asked for"""


class ListAnswer(Wire):
    """People, how many there are on all pages together, and where to go on."""

    users: list[UserAnswer]
    total: int
    next_cursor: str | None


class SearchRequest(Wire):
    """A part of a name or e-mail address; an empty one finds the newest people."""

    query: Annotated[str, StringConstraints(max_length=MAX_EMAIL)]
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class Found(Wire):
    """A person who was found."""

    id: str
    name: str
    email: str


class SearchAnswer(Wire):
    """Newest first."""

    results: list[Found]


class MessageRequest(Wire):
    """A mail to everybody selected, each their own."""

    selector: Selector
    subject: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SUBJECT), AfterValidator(_one_line)]
    message: Annotated[str, StringConstraints(min_length=1, max_length=MAX_MESSAGE), AfterValidator(_text)]


class MessageAnswer(Wire):
    """To whom a mail is on its way."""

    sent_user_ids: list[str]


class Financial(Wire):
    """What a new account begins with; for admins to say."""

    initial_balance: Amount = 0
    credit_limit: Amount = 0
    unlimited: bool = False


class AddRequest(Wire):
    """A new person, who gets a mail to choose a password."""

    email: Email
    name: Name
    financial: Financial | None = None


class AddAnswer(Wire):
    """Who was added."""

    user_id: str
    email: str


class RoleRequest(Wire):
    """What somebody may do from now on."""

    user_id: Id
    role: Role


class RoleAnswer(Wire):
    """What somebody may do now."""

    user_id: str
    role: Role


class DeleteRequest(Wire):
    """Whom to erase, and why. A dry run says what would be done and leaves everything as it is."""

    user_id: Id
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """only repeated in the report: it may name the person, so it is not kept"""
    dry_run: bool = False


class HardDeleted(Wire):
    """How many rows were deleted, by kind."""

    api_keys: int
    ssh_keys: int
    recipes: int
    instance_presets: int
    volumes: int = 0
    saved_environments: int = 0
    """disks of machines that are over"""
    allocations: int = 0
    """taken back: their nodes are free for others"""
    instance_tags: int = 0
    sessions: int
    partial_logins: int
    second_factors: int
    email_tokens: int
    identities: int
    """at other issuers"""
    sign_ins: int
    """under way"""
    mails: int
    invites: int
    payment_customers: int
    """at payment providers: their cards can no longer be used"""
    kept_answers: int
    """kept for repeated requests"""
    provider_memberships: int
    provider_customers: int


class Anonymized(Wire):
    """How many rows stay that from now on lead to nobody, by kind."""

    fraud_activities: int
    team_memberships: int
    team_api_keys_creator_nulled: int
    usage_payout_tx_nulled: int
    service_usage_payout_tx_nulled: int


class Report(Wire):
    """What an erasure did, or would do."""

    user_id: str
    requester_admin_id: str
    reason: str
    started_at: Instant
    finished_at: Instant
    retained_account_id: str
    hard_deleted: HardDeleted
    anonymized: Anonymized
    cleanup_failures: list[str]
    """always empty: all of it is done, or nothing"""


class DeleteAnswer(Wire):
    """Whether it was a dry run, and the report."""

    dry_run: bool
    report: Report
