"""Loads the parameters that a run saved, and prints their loss and samples of their text.

    python examples/train_lm.py --checkpoint-dir run --log-dir run-log
    python examples/evaluate.py --config run-log/config.yaml --sample-length 200

The optimizer's state is not loaded. One device is enough for a run with any number of workers.
"""

import dataclasses

from demo_optax.checkpoint import load_params
from lm import config as configuration
from lm import output, stores
from lm.report import console
from lm.setup import make_evaluation, prepare
from lm.train import LAST_EVALUATION_TOKENS, mistakes_said, show, written_by


def main() -> None:
    config = configuration.from_command_line(__doc__)
    if (folder := config.checkpoint_dir) is None:
        configuration.refuse(
            "there is nothing to load: give a --checkpoint-dir, or a --config that names one."
        )
    with mistakes_said():
        if config.tokenizer and not stores.exists(config.tokenizer):
            raise ValueError(
                f"--tokenizer {config.tokenizer}: there is no such file. Give that of the run."
            )
    config = dataclasses.replace(
        config,
        checkpoint_dir=None,  # which may be read-only
        log_dir=None,
        workers=None if config.swarm else 1,  # a swarm's worker is one already
        fsdp=1,
        simulate=None,
        coordinator=None,
        num_processes=None,
        process_id=None,
        distributed=False,
    )
    with mistakes_said():
        run = prepare(config)
        params = load_params(folder, run.params)
    loss = make_evaluation(run, lambda: None)(params, LAST_EVALUATION_TOKENS)
    console.print(f"loss on held-out text: {loss:.3f} nats per byte")
    show(written_by(run, params))


if __name__ == "__main__":
    output.end_no_training()
    main()
