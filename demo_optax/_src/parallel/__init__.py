"""Runs many workers: their local gradients, the worker axis of their state, the train step."""
