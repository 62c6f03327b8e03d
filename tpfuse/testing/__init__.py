"""What our tests and users' own tests share: several ranks in one call, groups without peers, graphs without Inductor."""

from tpfuse.testing.devices import take_device
from tpfuse.testing.fake import fake_world, interpret_graphs
from tpfuse.testing.spawn import RankError, spawn, under_torchrun

__all__ = ["RankError", "fake_world", "interpret_graphs", "spawn", "take_device", "under_torchrun"]
