"""Public SSH keys that people keep here by name."""
