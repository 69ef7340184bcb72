"""The business: people, keys, accounts, the ledger and its store."""
