"""A supervised run: joining the cluster, and the session around the training loop."""
