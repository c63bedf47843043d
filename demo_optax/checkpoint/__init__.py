"""Saves and restores whole runs with Orbax, exactly or on a different number of workers."""

from demo_optax._src.checkpoint.elastic import redistribute as redistribute
from demo_optax._src.checkpoint.reading import DamagedCheckpoint as DamagedCheckpoint
from demo_optax._src.checkpoint.reading import load_extra as load_extra
from demo_optax._src.checkpoint.reading import load_params as load_params
from demo_optax._src.checkpoint.storage import Checkpoint as Checkpoint
from demo_optax._src.checkpoint.storage import Checkpointer as Checkpointer
from demo_optax._src.places import folder_of as folder_of
