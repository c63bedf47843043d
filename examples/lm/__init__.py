"""The language-model trainer that train_lm.py, compare.py and evaluate.py run."""
