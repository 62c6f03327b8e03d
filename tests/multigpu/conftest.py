"""Everything here needs a CUDA device of compute capability 9.0, what is marked nccl two of them, and is skipped without.

With two, each rank has one, and they have NCCL. With one, ranks share it, over gloo (``checks.SHARED``), or are simulated.
"""

import pytest
import torch


def pytest_collection_modifyitems(items):
    items = [item for item in items if "multigpu" in item.path.parts]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    old = items and devices and torch.cuda.get_device_capability() < (9, 0)
    for item in items:
        needed = 2 if item.get_closest_marker("nccl") else 1
        if devices < needed or old:
            what = "compute capability 9.0" if old else f"{needed} CUDA device{'s' * (needed > 1)}"
            item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
