"""Volumes: disks that outlive the instances that they are attached to."""
