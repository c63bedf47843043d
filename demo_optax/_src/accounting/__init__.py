"""Bytes on the wire and seconds per step."""
