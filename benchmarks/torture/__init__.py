"""Breaks a run in every way we know, and counts what it does not survive: `make torture`."""
