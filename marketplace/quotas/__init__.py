"""Quotas: capacity of one node that is set aside for one holder."""
