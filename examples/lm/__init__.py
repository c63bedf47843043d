"""The language-model trainer of the examples: what train_lm.py and the scripts beside it run."""
