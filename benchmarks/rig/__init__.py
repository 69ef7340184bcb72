"""Parts that the benchmark commands share: the load client, process trees, the machine's own load, and result files."""
