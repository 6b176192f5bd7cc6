"""Pure decisions: the quorum and its presets. No torch, threads, sockets or clock in here."""

from torchquorum.rules.presets import Async, Bounded, Buffered, Local, Outer, Rule, Sync, parse_rule
from torchquorum.rules.quorum import Quorum

__all__ = ["Async", "Bounded", "Buffered", "Local", "Outer", "Quorum", "Rule", "Sync", "parse_rule"]
