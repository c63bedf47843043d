"""A run of the trainer that takes seconds."""

import pathlib

from lm.config import Config

ROOT = pathlib.Path(__file__).parents[1]
NANO = Config(
    preset="nano",
    text=(str(ROOT / "demo_optax"),),
    workers=2,
    batch_size=4,
    sequence_length=16,
    steps=6,
    warmup_steps=2,
    evaluate_every=3,
)


def first_of(make):
    """A function that always returns what it made first: what is compiled once does for all."""
    made = []

    def first(*arguments, **options):
        if not made:
            made.append(make(*arguments, **options))
        return made[0]

    return first


def words_of(config):
    """A configuration as the words of a command line, by way of its file."""
    path = pathlib.Path(config.log_dir) / "given.yaml"
    config.write(path)
    return ["--config", str(path)]
