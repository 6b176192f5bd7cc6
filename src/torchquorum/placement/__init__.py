"""Which variable is on which shard."""

from torchquorum.placement.layout import Layout, Piece, Section, Variable, check_same_variables, place

__all__ = ["Layout", "Piece", "Section", "Variable", "check_same_variables", "place"]
