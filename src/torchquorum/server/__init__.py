"""A ps task: the shard (handle(message) -> replies), the leader's decisions, and the threads that take turns with them."""
