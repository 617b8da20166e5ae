import os

# The kernels were measured and tested with a product and a sum fused into one instruction. Triton warns while
# that is its default, and from 3.10 on the default is off.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
