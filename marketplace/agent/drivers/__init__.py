"""What makes machines: one protocol (`base`), QEMU, podman or another Docker-compatible engine, and a scripted fake."""
