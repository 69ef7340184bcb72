"""Saved environments: disks of ended virtual machines, within their grace."""
