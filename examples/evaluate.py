"""Loads the parameters that a run saved, without its optimizer, and looks at what they learned.

    python examples/train_lm.py --checkpoint-dir run --log-dir run-log
    python examples/evaluate.py --config run-log/config.yaml --sample-length 200

One device is enough, however many workers the run had.
"""

import dataclasses
import sys

from demo_optax.checkpoint import load_params
from lm import config as configuration
from lm.report import console
from lm.setup import make_evaluation, prepare
from lm.train import LAST_EVALUATION_TOKENS, show, written_by


def main() -> None:
    config = configuration.from_command_line(__doc__)
    if (folder := config.checkpoint_dir) is None:
        sys.exit("error: --checkpoint-dir, or a --config that names one, says what to load.")
    if config.tokenizer and not config.tokenizer.exists():
        sys.exit(f"error: --tokenizer {config.tokenizer}: there is no such file.")
    config = dataclasses.replace(
        config, workers=1, fsdp=1, coordinator=None, num_processes=None, distributed=False
    )
    try:
        run = prepare(config)
        params = load_params(folder, run.params)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"error: {error}")
    loss = make_evaluation(run, lambda: None)(params, LAST_EVALUATION_TOKENS)
    console.print(f"loss on held-out text: {loss:.3f} nats per byte")
    show(written_by(run, params))


if __name__ == "__main__":
    main()
