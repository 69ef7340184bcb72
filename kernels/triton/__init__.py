"""The operations on NVIDIA GPUs, in Triton: importable only where triton is installed."""
