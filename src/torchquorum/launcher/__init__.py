"""Starts tasks: local processes (later: Ray)."""
