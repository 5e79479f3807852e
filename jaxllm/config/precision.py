"""Dtypes of each precision policy, and bytes per element of each dtype. This module does not import JAX."""

# Precision policy -> (compute dtype, dtype of the stored weights).
POLICY_DTYPES = {
    "fp32": ("float32", "float32"),
    "bf16": ("bfloat16", "float32"),
    "fp16": ("float16", "float32"),
    "bf16_pure": ("bfloat16", "bfloat16"),
}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
