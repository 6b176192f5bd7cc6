"""Shared memory between tasks of one host: segments, slots of versions and gradients, the lock."""
