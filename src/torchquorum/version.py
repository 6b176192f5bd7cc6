"""Which torchquorum this is: told to other tasks, which refuse one that speaks another protocol, and to people."""

__version__ = "0.1.0"
