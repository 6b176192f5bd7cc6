"""Bytes between tasks: messages, codec, channels (ZeroMQ, in-process, faulty for tests) and shared memory."""
