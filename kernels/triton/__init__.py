"""The operations on NVIDIA GPUs, in Triton: importable only where triton is installed."""

import os

# Triton 3.9 warns when nobody says whether products and sums may fuse, and 3.10 changes what it does then. They may,
# except where a kernel is launched with enable_fp_fusion=False.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
