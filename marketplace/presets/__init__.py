"""Presets: shapes of custom instances that a person rented before."""
