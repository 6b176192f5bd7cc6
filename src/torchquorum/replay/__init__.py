"""Runs that were recorded, made again: what the record says, ps tasks that follow it, and the workers' processes."""
