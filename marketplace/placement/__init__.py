"""Who has which part of which node: arithmetic, choice, claims and leases."""
