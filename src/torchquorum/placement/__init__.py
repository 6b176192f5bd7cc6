"""Where things go: variables to shards (later: towers and operations to devices)."""

from torchquorum.placement.layout import Layout, Piece, Section, Variable, check_same_variables, place

__all__ = ["Layout", "Piece", "Section", "Variable", "check_same_variables", "place"]
