"""Checkpoints of a whole run with Orbax, exact on the same workers and elastic on others."""
