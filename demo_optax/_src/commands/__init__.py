"""The command ``demo-optax``."""
