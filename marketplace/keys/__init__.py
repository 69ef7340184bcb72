"""API keys: their format, storage and life."""
