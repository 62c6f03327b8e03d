"""What the tests of bad inputs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist


def check_told(provoke: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        provoke()
    assert caught.type is error or error is not ValueError, f"{caught.type.__name__}: {caught.value}"
    for word in words:
        assert word in str(caught.value), f"no {word!r} in: {caught.value}"


def destroyed() -> dist.ProcessGroup:
    """A group that is gone."""
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return group
