"""The management API's wire: operations, envelopes, versions, errors, callers, limits, documents."""
