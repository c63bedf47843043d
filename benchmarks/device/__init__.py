"""One prepared run for an accelerator: it checks and times the optimizers on it, in minutes."""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

START = time.monotonic()  # before JAX is imported, which takes some seconds
