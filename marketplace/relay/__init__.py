"""Ports of machines that nobody can reach, published by a relay that their nodes connect to."""
