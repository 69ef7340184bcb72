"""Parts of the GPU suite (benchmarks.gpu_suite): one file per idea, each usable on a CPU with a tiny shape."""
