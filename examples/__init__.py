"""Programs that show `coop_jax` at work."""
