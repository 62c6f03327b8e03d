"""Everything here needs CUDA devices, two of them unless its ranks share one (test_simulated_*), and is skipped without."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = 1 if item.path.name.startswith("test_simulated_") else 2
        if "multigpu" in item.path.parts and devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' * (needed > 1)}"))
