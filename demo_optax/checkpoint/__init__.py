"""Checkpoints of a whole run with Orbax: exact on the same workers, elastic on others."""

from demo_optax.checkpoint.elastic import redistribute as redistribute
from demo_optax.checkpoint.storage import Checkpoint as Checkpoint
from demo_optax.checkpoint.storage import Checkpointer as Checkpointer
from demo_optax.checkpoint.storage import load_params as load_params
