"""Trains with MaxText as it is installed, and prints what came of it.

python train_maxtext.py NAME=VALUE ...
"""

import json
import pathlib
import sys


def main(arguments):
    import jax
    import maxtext
    from maxtext.trainers.pre_train import train

    import demo_optax

    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    config, recorder = train.initialize(["train", str(base), *arguments])
    state = train.train_loop(config, recorder)
    mesh = jax.tree.leaves(state.model)[0].sharding.mesh
    metrics = demo_optax.exchange_metrics(state.optimizer)
    momenta = jax.tree.leaves(state.optimizer["opt_state"][0]["momentum"])
    result = dict(
        drift=[str(each) for each in demo_optax.check_replicas(state, mesh, "diloco")],
        participants=int(metrics.participants),
        momenta_differ=all(bool((momentum[0] != momentum[1]).any()) for momentum in momenta),
        mesh={name: size for name, size in mesh.shape.items() if size > 1},
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
