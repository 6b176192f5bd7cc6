"""A ps task: the shard (handle(message) -> replies), the leader's decisions, and the one thread that owns them."""
