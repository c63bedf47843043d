"""Accounting of bytes on the wire and seconds per step."""
