"""Instances: virtual machines and containers that somebody rents."""
