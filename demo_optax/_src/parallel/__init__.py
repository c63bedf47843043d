"""Runs many workers: their local gradients, the worker axis of their state, the train step."""

from demo_optax._src.parallel.gradients import WorkerGradients as WorkerGradients
from demo_optax._src.parallel.gradients import local_value_and_grad as local_value_and_grad
from demo_optax._src.parallel.gradients import worker_gradients as worker_gradients
from demo_optax._src.parallel.layout import state_shardings as state_shardings
from demo_optax._src.parallel.layout import state_specs as state_specs
from demo_optax._src.parallel.replicas import Drift as Drift
from demo_optax._src.parallel.replicas import check_replicas as check_replicas
from demo_optax._src.parallel.replicas import repair_replicas as repair_replicas
from demo_optax._src.parallel.train_step import TrainMetrics as TrainMetrics
from demo_optax._src.parallel.train_step import make_train_step as make_train_step
from demo_optax._src.parallel.worker_axis import init_model_state as init_model_state
from demo_optax._src.parallel.worker_axis import init_opt_state as init_opt_state
from demo_optax._src.parallel.worker_axis import stack_workers as stack_workers
