"""What each way to train costs in loss: studies over methods, learning rates and seeds."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
