"""Nodes: the machines of providers, and what their agents tell of them."""
