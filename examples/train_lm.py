"""Trains a language model with DeMo on several workers, simulated or real.

    python examples/train_lm.py                      8 simulated workers, minutes on two CPU cores
    python examples/train_lm.py --optimizer adamw    ordinary data parallelism, for comparison
    python examples/train_lm.py --config run.yaml    settings from a file, and others as given
    python examples/train_lm.py --help               all settings

On a machine with accelerators each of them is a worker. With one process on each of several hosts,
start the same command on all of them, with --distributed under SLURM, Kubernetes or on a TPU pod,
or with --coordinator, --num-processes and --process-id; examples/launch_local.py does so on one
machine for a try. With --checkpoint-dir a run that was stopped goes on when it is started again,
on as many processes or others.
"""

import signal

if __name__ == "__main__":
    # Until there is something to save Ctrl-C ends this without a word; imports take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from lm import config
    from lm.train import run_or_exit

    run_or_exit(config.from_command_line(__doc__))
