"""Signing in: sessions, second factor, what a caller may do."""
