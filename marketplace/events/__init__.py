"""What was changed, by whom: the audit log."""
