"""When a mail is tried again, and which addresses and subjects can be, pure."""

from __future__ import annotations

import re

SECOND = 1_000_000
LEASE_US = 180 * SECOND
"""How long a deliverer has a mail for itself."""
SEND_US = 60 * SECOND
"""How long one attempt may take; shorter than the lease, so that nobody sends on a lease that has ended."""
FIRST_WAIT_US = 30 * SECOND
LONGEST_WAIT_US = 2 * 3600 * SECOND
MAX_ATTEMPTS = 12
"""With these waits a mail is given up about eight hours after the first attempt."""
KEEP_US = 30 * 86_400 * SECOND
MAX_LOCAL = 64
MAX_SUBJECT = 200

_LOCAL = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAX_ADDRESS = 254


class AddressError(ValueError):
    """No mail can go to this address. The message does not repeat it."""


def wait_us(attempts: int) -> int:
    """How long to wait after so many failed attempts: twice as long each time, up to a bound."""
    return min(FIRST_WAIT_US << min(attempts - 1, 16), LONGEST_WAIT_US)


def mail_address(text: str) -> str:
    """Return an address as mail needs it: an unquoted local part, a domain of plain labels (RFC 5321, 4.1.2; names in
    other scripts become their ASCII form, RFC 3490). AddressError for everything else: nothing that a header or a
    list of addresses gives a meaning to gets through.
    """
    local, at, domain = text.rpartition("@")
    try:
        plain = domain.encode("idna").decode("ascii") if domain else ""
    except UnicodeError:
        plain = ""
    labels = plain.split(".")
    if (
        not at
        or len(local) > MAX_LOCAL
        or not _LOCAL.fullmatch(local)
        or not all(_LABEL.fullmatch(label) for label in labels)
        or len(local) + 1 + len(plain) > _MAX_ADDRESS
    ):
        raise AddressError("not an address that mail can go to")
    return f"{local}@{plain}"


def subject_line(text: str) -> str:
    """Return a text as one line that a header can hold: every run of spaces, line ends and control characters becomes
    one space, and it is cut at MAX_SUBJECT."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MAX_SUBJECT else line[: MAX_SUBJECT - 1] + "…"
