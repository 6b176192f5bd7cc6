"""The fast path: workers of one host make updates in shared memory while a ps has nothing to decide."""
