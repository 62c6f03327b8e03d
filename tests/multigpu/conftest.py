"""Everything here needs two CUDA devices and is skipped where there are fewer."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and torch.cuda.device_count() >= 2:
        return
    for item in items:
        if "multigpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
