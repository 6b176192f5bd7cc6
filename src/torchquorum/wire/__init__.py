"""Messages between tasks: what they are, how they become bytes, how one task asks another, and the channels that carry them."""
