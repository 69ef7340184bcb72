"""One double-entry ledger for everything sold."""
