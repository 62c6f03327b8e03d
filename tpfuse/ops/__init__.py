"""Fused operations, callable eagerly. Each file holds one: its meaning, schema, fake form and dispatch."""

from tpfuse.ops.act_mul_quantize_fp8 import act_mul_quantize_fp8
from tpfuse.ops.all_gather_matmul import all_gather_matmul
from tpfuse.ops.all_reduce import all_reduce
from tpfuse.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tpfuse.ops.all_reduce_rms_norm_quantize_fp8 import all_reduce_rms_norm_quantize_fp8
from tpfuse.ops.dual_rms_norm import dual_rms_norm
from tpfuse.ops.matmul_all_reduce import matmul_all_reduce
from tpfuse.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpfuse.ops.qk_norm_rope import qk_norm_rope
from tpfuse.ops.quantize_fp8 import Recipe, quantize_fp8_per_group, quantize_fp8_per_token, quantize_fp8_static
from tpfuse.ops.quantize_nvfp4 import quantize_nvfp4
from tpfuse.ops.rms_norm_pad import rms_norm_pad
from tpfuse.ops.rms_norm_quantize_fp8 import rms_norm_quantize_fp8
from tpfuse.ops.rope_kvcache import rope_kvcache

__all__ = [
    "Recipe",
    "act_mul_quantize_fp8",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_quantize_fp8",
    "dual_rms_norm",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "qk_norm_rope",
    "quantize_fp8_per_group",
    "quantize_fp8_per_token",
    "quantize_fp8_static",
    "quantize_nvfp4",
    "rms_norm_pad",
    "rms_norm_quantize_fp8",
    "rope_kvcache",
]
