"""What a session does around its training loop."""
