"""Values of 4 bits by our Triton kernel: what it cannot do, and its launch."""

from __future__ import annotations

import torch

_ELEMENTS = 2048  # of a program


def cannot(x: torch.Tensor) -> str:
    """Why the kernel cannot take x [..., D]; "" if it can."""
    if x.device.type != "cuda":
        return f"no kernel for {x.device.type}"
    return "" if torch.cuda.get_device_capability(x.device) >= (8, 9) else "compute capability 8.9 is needed for FP8"


def quantize_nvfp4(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation of ``tpfuse.ops.quantize_nvfp4`` (see there), where ``cannot`` finds nothing."""
    from tpfuse.kernels.triton.quantize_nvfp4 import tpfuse_quantize_nvfp4

    *leading, size = x.shape
    packed = torch.empty((*leading, size // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*leading, size // 16), dtype=torch.float8_e4m3fn, device=x.device)
    with torch.cuda.device(x.device):
        tpfuse_quantize_nvfp4[(-(-x.numel() // _ELEMENTS),)](
            x.contiguous(), scale, packed, scales, x.numel(), ELEMENTS=_ELEMENTS, SCALED=scale is not None
        )
    return packed, scales
