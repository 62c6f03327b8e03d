"""When the ranks of a group can have an arena, by what they tell one another."""

from __future__ import annotations

import pytest

from tpfuse.comm import arena
from tpfuse.comm.symmetric import SHARE_VARIABLE, may_share_devices

ALIKE = {"host": "here", "bytes": "64", "shares": "False"}


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"device": "a"}, {"device": "b"}, ""),
        ({"device": "a"}, {"device": "a"}, "two ranks share one device"),
        ({"device": "a", "shares": "True"}, {"device": "a"}, "two ranks share one device"),
        ({"device": "a", "shares": "True"}, {"device": "a", "shares": "True"}, ""),
        ({"device": "a", "host": "there"}, {"device": "b"}, "the ranks are on several hosts"),
        ({"device": "a", "bytes": "32"}, {"device": "b"}, "the ranks ask for different arena sizes"),
    ],
)
def test_ranks_that_do_not_fit(first, second, reason):
    assert arena._mismatch([{**ALIKE, **first}, {**ALIKE, **second}]) == reason


def test_devices_are_shared_only_where_torch_is_told_so(monkeypatch):
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    assert not may_share_devices()
    for value, shared in (("1", True), ("0", False)):
        monkeypatch.setenv(SHARE_VARIABLE, value)
        assert may_share_devices() == shared
