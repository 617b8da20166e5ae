import os

# A product and a sum are one instruction, as these kernels were measured and tested: Triton warns while that
# is its default, and from 3.10 on it is not.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
