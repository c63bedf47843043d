"""Checkpoints of a whole run with Orbax, exact on the same workers and elastic on others."""

try:
    import orbax.checkpoint as _  # noqa: F401
except ImportError as error:
    needed = "checkpoints need Orbax: in the source folder, pip install '.[checkpoint]'."
    raise ImportError(needed) from error
