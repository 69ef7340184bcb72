"""Providers: the companies whose machines are in the pool, and their people."""
