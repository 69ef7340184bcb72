"""Errors of the management surface: one list of codes with their statuses, one exception, one place that renders it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import orjson


class Code(StrEnum):
    """What went wrong, for programs. Codes are never reused for another meaning."""

    BAD_REQUEST = "BadRequest"
    VALIDATION_FAILED = "ValidationFailed"
    UNSUPPORTED_VERSION = "UnsupportedVersion"
    AMBIGUOUS_CREDENTIALS = "AmbiguousCredentials"
    INVALID_TOTP_CODE = "InvalidTotpCode"
    INVALID_TRANSITION = "InvalidTransition"
    INVALID_SIGNATURE = "InvalidSignature"
    INVALID_EMAIL_TOKEN = "InvalidEmailToken"
    CPU_SHARING_POLICY_REQUIRED = "CpuSharingPolicyRequired"
    SHARED_POLICY_RESERVED = "SharedPolicyReserved"
    CUSTOM_INSTANCES_DISABLED = "CustomInstancesDisabled"
    IMAGE_DRIVER_MISMATCH = "ImageDriverMismatch"
    NODE_DRAINING = "NodeDraining"
    NODE_NOT_DRAINING = "NodeNotDraining"
    NODE_NOT_DRAINED = "NodeNotDrained"
    ENVIRONMENT_GONE = "EnvironmentGone"
    EMPTY_QUOTA = "EmptyQuota"
    QUOTA_EXCEEDS_NODE = "QuotaExceedsNode"
    PROXY_CREDENTIALS_NOT_ALLOWED = "ProxyCredentialsNotAllowed"
    NOT_AUTHENTICATED = "NotAuthenticated"
    INVALID_TOKEN = "InvalidToken"
    EXPIRED_TOKEN = "ExpiredToken"
    INVALID_API_KEY = "InvalidApiKey"
    INVALID_CREDENTIALS = "InvalidCredentials"
    INVALID_PARTIAL_TOKEN = "InvalidPartialToken"
    INVALID_OAUTH_STATE = "InvalidOAuthState"
    OAUTH_REFUSED = "OAuthRefused"
    INSUFFICIENT_FUNDS = "InsufficientFunds"
    PAYMENT_REFUSED = "PaymentRefused"
    PERMISSION_DENIED = "PermissionDenied"
    CREDENTIALS_NOT_PERMITTED = "CredentialsNotPermitted"
    ORIGIN_NOT_ALLOWED = "OriginNotAllowed"
    NOT_TEAM_MEMBER = "NotTeamMember"
    EMAIL_NOT_VERIFIED = "EmailNotVerified"
    REGISTRATION_CLOSED = "RegistrationClosed"
    NOT_NODE_OPERATOR = "NotNodeOperator"
    NOT_NETWORK_MEMBER = "NotNetworkMember"
    WALLED_TO_ALLOCATIONS = "WalledToAllocations"
    NOT_FOUND = "NotFound"
    KEY_NOT_FOUND = "KeyNotFound"
    USER_NOT_FOUND = "UserNotFound"
    TEAM_NOT_FOUND = "TeamNotFound"
    MEMBER_NOT_FOUND = "MemberNotFound"
    INVITE_NOT_FOUND = "InviteNotFound"
    PROVIDER_NOT_FOUND = "ProviderNotFound"
    PAYMENT_NOT_FOUND = "PaymentNotFound"
    DATACENTER_NOT_FOUND = "DatacenterNotFound"
    INSTANCE_TYPE_NOT_FOUND = "InstanceTypeNotFound"
    INSTANCE_NOT_FOUND = "InstanceNotFound"
    NODE_NOT_FOUND = "NodeNotFound"
    NETWORK_NOT_FOUND = "NetworkNotFound"
    QUOTA_NOT_FOUND = "QuotaNotFound"
    RESERVATION_NOT_FOUND = "ReservationNotFound"
    VOLUME_NOT_FOUND = "VolumeNotFound"
    RECIPE_NOT_FOUND = "RecipeNotFound"
    PRESET_NOT_FOUND = "PresetNotFound"
    SSH_KEY_NOT_FOUND = "SshKeyNotFound"
    METHOD_NOT_ALLOWED = "MethodNotAllowed"
    REQUEST_TIMEOUT = "RequestTimeout"
    CREDIT_IN_USE = "CreditInUse"
    DUPLICATE_REQUEST_ID = "DuplicateRequestId"
    REFUND_EXCEEDS_PAYMENT = "RefundExceedsPayment"
    TEAM_IN_USE = "TeamInUse"
    TEAM_FULL = "TeamFull"
    LAST_OWNER = "LastOwner"
    ALREADY_TEAM_MEMBER = "AlreadyTeamMember"
    EMAIL_EXISTS = "EmailExists"
    IDENTITY_IN_USE = "IdentityInUse"
    PROVIDER_NAME_EXISTS = "ProviderNameExists"
    OTHER_PROVIDER = "OtherProvider"
    USER_PROTECTED = "UserProtected"
    IDEMPOTENCY_KEY_REUSED = "IdempotencyKeyReused"
    TOTP_ALREADY_ENABLED = "TotpAlreadyEnabled"
    CAPACITY_RESERVED = "CapacityReserved"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    NOT_COVERED_BY_QUOTA = "NotCoveredByQuota"
    NAME_EXISTS = "NameExists"
    IN_USE = "InUse"
    VOLUME_NAME_EXISTS = "VolumeNameExists"
    VOLUME_ATTACHED = "VolumeAttached"
    NETWORK_IN_USE = "NetworkInUse"
    RESERVATION_BOUND = "ReservationBound"
    NODE_IN_USE = "NodeInUse"
    STALE_SESSION = "StaleSession"
    BODY_TOO_LARGE = "BodyTooLarge"
    RATE_LIMITED = "RateLimited"
    INTERNAL_ERROR = "InternalError"
    SERVICE_UNAVAILABLE = "ServiceUnavailable"
    NODE_ALLOCATION_MODE_MIXED = "NodeAllocationModeMixed"
    NODE_NOT_RESPONDING = "NodeNotResponding"

    @property
    def status(self) -> int:
        """HTTP status of an answer with this code."""
        return int(_STATUS[self])

    @property
    def type(self) -> str:
        """The family of errors that it belongs to."""
        return _TYPES.get(self.status, "invalid_request_error")


_STATUS: dict[Code, int] = {
    Code.BAD_REQUEST: HTTPStatus.BAD_REQUEST,
    Code.VALIDATION_FAILED: HTTPStatus.BAD_REQUEST,
    Code.UNSUPPORTED_VERSION: HTTPStatus.BAD_REQUEST,
    Code.AMBIGUOUS_CREDENTIALS: HTTPStatus.BAD_REQUEST,
    Code.INVALID_TOTP_CODE: HTTPStatus.BAD_REQUEST,
    Code.INVALID_TRANSITION: HTTPStatus.BAD_REQUEST,
    Code.INVALID_SIGNATURE: HTTPStatus.BAD_REQUEST,
    Code.INVALID_EMAIL_TOKEN: HTTPStatus.BAD_REQUEST,
    Code.CPU_SHARING_POLICY_REQUIRED: HTTPStatus.BAD_REQUEST,
    Code.SHARED_POLICY_RESERVED: HTTPStatus.BAD_REQUEST,
    Code.CUSTOM_INSTANCES_DISABLED: HTTPStatus.BAD_REQUEST,
    Code.IMAGE_DRIVER_MISMATCH: HTTPStatus.BAD_REQUEST,
    Code.NODE_DRAINING: HTTPStatus.BAD_REQUEST,
    Code.NODE_NOT_DRAINING: HTTPStatus.BAD_REQUEST,
    Code.NODE_NOT_DRAINED: HTTPStatus.BAD_REQUEST,
    Code.ENVIRONMENT_GONE: HTTPStatus.BAD_REQUEST,
    Code.EMPTY_QUOTA: HTTPStatus.BAD_REQUEST,
    Code.QUOTA_EXCEEDS_NODE: HTTPStatus.BAD_REQUEST,
    Code.PROXY_CREDENTIALS_NOT_ALLOWED: HTTPStatus.BAD_REQUEST,
    Code.NOT_AUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Code.INVALID_TOKEN: HTTPStatus.UNAUTHORIZED,
    Code.EXPIRED_TOKEN: HTTPStatus.UNAUTHORIZED,
    Code.INVALID_API_KEY: HTTPStatus.UNAUTHORIZED,
    Code.INVALID_CREDENTIALS: HTTPStatus.UNAUTHORIZED,
    Code.INVALID_PARTIAL_TOKEN: HTTPStatus.UNAUTHORIZED,
    Code.INVALID_OAUTH_STATE: HTTPStatus.UNAUTHORIZED,
    Code.OAUTH_REFUSED: HTTPStatus.UNAUTHORIZED,
    Code.INSUFFICIENT_FUNDS: HTTPStatus.PAYMENT_REQUIRED,
    Code.PAYMENT_REFUSED: HTTPStatus.PAYMENT_REQUIRED,
    Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Code.CREDENTIALS_NOT_PERMITTED: HTTPStatus.FORBIDDEN,
    Code.ORIGIN_NOT_ALLOWED: HTTPStatus.FORBIDDEN,
    Code.NOT_TEAM_MEMBER: HTTPStatus.FORBIDDEN,
    Code.EMAIL_NOT_VERIFIED: HTTPStatus.FORBIDDEN,
    Code.REGISTRATION_CLOSED: HTTPStatus.FORBIDDEN,
    Code.NOT_NODE_OPERATOR: HTTPStatus.FORBIDDEN,
    Code.NOT_NETWORK_MEMBER: HTTPStatus.FORBIDDEN,
    Code.WALLED_TO_ALLOCATIONS: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.KEY_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.USER_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.TEAM_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.MEMBER_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.INVITE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.PROVIDER_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.PAYMENT_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.DATACENTER_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.INSTANCE_TYPE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.INSTANCE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.NODE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.NETWORK_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.QUOTA_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.RESERVATION_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.VOLUME_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.RECIPE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.PRESET_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.SSH_KEY_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.METHOD_NOT_ALLOWED: HTTPStatus.METHOD_NOT_ALLOWED,
    Code.REQUEST_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    Code.CREDIT_IN_USE: HTTPStatus.CONFLICT,
    Code.DUPLICATE_REQUEST_ID: HTTPStatus.CONFLICT,
    Code.REFUND_EXCEEDS_PAYMENT: HTTPStatus.CONFLICT,
    Code.TEAM_IN_USE: HTTPStatus.CONFLICT,
    Code.TEAM_FULL: HTTPStatus.CONFLICT,
    Code.LAST_OWNER: HTTPStatus.CONFLICT,
    Code.ALREADY_TEAM_MEMBER: HTTPStatus.CONFLICT,
    Code.EMAIL_EXISTS: HTTPStatus.CONFLICT,
    Code.IDENTITY_IN_USE: HTTPStatus.CONFLICT,
    Code.PROVIDER_NAME_EXISTS: HTTPStatus.CONFLICT,
    Code.OTHER_PROVIDER: HTTPStatus.CONFLICT,
    Code.USER_PROTECTED: HTTPStatus.CONFLICT,
    Code.IDEMPOTENCY_KEY_REUSED: HTTPStatus.CONFLICT,
    Code.TOTP_ALREADY_ENABLED: HTTPStatus.CONFLICT,
    Code.CAPACITY_RESERVED: HTTPStatus.CONFLICT,
    Code.INSUFFICIENT_CAPACITY: HTTPStatus.CONFLICT,
    Code.NOT_COVERED_BY_QUOTA: HTTPStatus.CONFLICT,
    Code.NAME_EXISTS: HTTPStatus.CONFLICT,
    Code.IN_USE: HTTPStatus.CONFLICT,
    Code.VOLUME_NAME_EXISTS: HTTPStatus.CONFLICT,
    Code.VOLUME_ATTACHED: HTTPStatus.CONFLICT,
    Code.NETWORK_IN_USE: HTTPStatus.CONFLICT,
    Code.RESERVATION_BOUND: HTTPStatus.CONFLICT,
    Code.NODE_IN_USE: HTTPStatus.CONFLICT,
    Code.STALE_SESSION: HTTPStatus.CONFLICT,
    Code.BODY_TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Code.RATE_LIMITED: HTTPStatus.TOO_MANY_REQUESTS,
    Code.INTERNAL_ERROR: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.SERVICE_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.NODE_ALLOCATION_MODE_MIXED: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.NODE_NOT_RESPONDING: HTTPStatus.SERVICE_UNAVAILABLE,
}
_TYPES: dict[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class Refusal(Exception):  # noqa: N818 - not a defect: the answer to a request that cannot be granted
    """An answer other than success. Its message may be shown to anybody; `param` names the field that is to blame."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.details = details
        self.headers = headers
        if code.status == HTTPStatus.UNAUTHORIZED:
            self.headers = (("WWW-Authenticate", "Bearer"), *headers)

    def body(self, request_id: str) -> dict[str, Any]:
        """The member `error` of the answer."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.code.type,
            "param": self.param,
            "code": self.code.value,
            "request_id": request_id,
        }
        if self.details is not None:
            error["details"] = self.details
        return error


def render(refusal: Refusal, request_id: str, version: str | None = None) -> bytes:
    """The whole body of an answer; `version` is that of the envelope where the request came in one."""
    envelope: dict[str, Any] = {} if version is None else {"version": version}
    return orjson.dumps({**envelope, "error": refusal.body(request_id)})
