"""Trains a language model with DeMo on several workers.

    python examples/train_lm.py                      8 workers on one CPU, minutes on two cores
    python examples/train_lm.py --optimizer adamw    ordinary data parallelism, for comparison
    python examples/train_lm.py --config run.yaml    settings from a file, and others as given
    python examples/train_lm.py --help               all settings

On a machine with accelerators, each accelerator is a worker. On several hosts, start the same
command on each host. Under SLURM, Kubernetes or on a TPU pod add --distributed; elsewhere add
--coordinator, --num-processes and --process-id. examples/launch_local.py tries that on one machine.
With --checkpoint-dir, a run that was stopped continues when it is started again, on the same number
of processes or another one.

With --swarm URL, workers come and go: start this on any machine that sees the store, stop it, and
start it again.
"""

import signal

if __name__ == "__main__":
    # Ctrl-C ends this at once until there is something to save; imports take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from lm import config, output

    output.end_no_training()
    settings = config.from_command_line(__doc__)
    if settings.swarm:
        from lm.swarm import run_or_exit
    else:
        from lm.train import run_or_exit
    run_or_exit(settings)
