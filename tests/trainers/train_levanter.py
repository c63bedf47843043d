"""Trains with Levanter's trainer as it is installed, and prints what came of it.

python train_levanter.py STEPS FOLDER AXES COMPUTE_MAPPING PARAM_MAPPING
"""

import json
import sys


def main(steps, folder, axes, compute_mapping, param_mapping):
    import haliax as hax
    import jax
    import yaml
    from haliax import Axis
    from levanter.callbacks.watch import WatchConfig
    from levanter.checkpoint import CheckpointerConfig
    from levanter.data.dataset import ListAsyncDataset
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.tracker.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig, initialize
    from levanter.utils.mesh import MeshConfig

    import demo_optax

    config = TrainerConfig(
        id="trial",
        tracker=NoopConfig(),
        watch=WatchConfig(watch_targets=[]),
        require_accelerator=False,
        num_train_steps=int(steps),
        train_batch_size=8,
        mesh=MeshConfig(
            axes=yaml.safe_load(axes),
            compute_mapping=yaml.safe_load(compute_mapping),
            param_mapping=yaml.safe_load(param_mapping),
        ),
        checkpointer=CheckpointerConfig(base_path=folder, keep=[{"every": 5}]),
    )
    initialize(config)
    model = LlamaConfig(
        max_seq_len=32,
        hidden_dim=64,
        intermediate_dim=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
    )
    vocabulary, positions = Axis("vocab", 256), Axis("position", 32)
    tokens = jax.random.randint(jax.random.key(0), (8, 32), 0, 256)
    examples = [LmExample.causal(hax.named(row, (positions,))) for row in tokens]
    schedule = AdamConfig(learning_rate=3e-3, warmup=0.0).lr_scheduler(config.num_train_steps)
    optimizer = demo_optax.demo_scaled(schedule, axis_name="replica")

    def loss_function(model, example, *, key=None):
        return model.compute_next_token_loss(example, key=key)

    losses = {}
    with Trainer(config, optimizer, loss_function) as trainer:
        key = jax.random.PRNGKey(0)  # its checkpoints know no other keys
        state = trainer.initial_state(key, model_init=lambda: model.build(vocabulary, key=key))
        loader = iter(trainer.data_loader(ListAsyncDataset(examples * 100)))
        while state.step < config.num_train_steps:
            info = trainer.train_step(state, next(loader))
            losses[info.step], state = info.loss, info.state
        mesh = trainer.device_mesh
    plain = jax.tree.map(
        lambda x: x.array if isinstance(x, hax.NamedArray) else x,
        state.opt_state,
        is_leaf=lambda x: isinstance(x, hax.NamedArray),
    )
    metrics = demo_optax.exchange_metrics(plain)
    momenta = jax.tree.leaves(plain[0].momentum)
    result = dict(
        losses=losses,
        drift=[
            str(each)
            for each in demo_optax.check_replicas((state.model, state.opt_state), mesh, "replica")
        ],
        participants=int(metrics.participants),
        momenta_differ=all(bool((momentum[0] != momentum[1]).any()) for momentum in momenta),
        mesh={name: size for name, size in mesh.shape.items() if size > 1},
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
