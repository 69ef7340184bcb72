"""Layers shared by the model families; each is a thin holder of weights over the kernels table."""
