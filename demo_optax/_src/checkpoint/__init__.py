"""Checkpoints of a whole run with Orbax: exact on the same workers, elastic on others."""
