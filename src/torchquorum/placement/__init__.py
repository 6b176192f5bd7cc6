"""Where things go: variables to shards, and the names of devices, to which a worker puts modules and operations."""

from torchquorum.placement.layout import Layout, Piece, Section, Variable, check_same_variables, place

__all__ = ["Layout", "Piece", "Section", "Variable", "check_same_variables", "place"]
