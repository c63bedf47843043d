"""Holds the implementation; the modules beside this folder export its public names."""
