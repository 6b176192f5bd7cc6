"""The arithmetic of an update, below server and worker: the ps and the fast path call the same."""
