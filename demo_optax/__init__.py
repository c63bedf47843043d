"""Provides DeMo (decoupled momentum) as an optax gradient transformation for JAX."""

from importlib.metadata import PackageNotFoundError, version

from demo_optax._src.axes import AxisName as AxisName
from demo_optax._src.compression import Compression as Compression
from demo_optax._src.compression import Selection as Selection
from demo_optax._src.compression import TransformName as TransformName
from demo_optax._src.compression import ValueCoding as ValueCoding
from demo_optax._src.decoupled import LookAheadState as LookAheadState
from demo_optax._src.decoupled import decoupled as decoupled
from demo_optax._src.decoupled import decoupled_momentum as decoupled_momentum
from demo_optax._src.exchange import AllGather as AllGather
from demo_optax._src.exchange import Delayed as Delayed
from demo_optax._src.exchange import Exchange as Exchange
from demo_optax._src.exchange import Outbox as Outbox
from demo_optax._src.exchange import TwoPhase as TwoPhase
from demo_optax._src.local_state import LocalStepsState as LocalStepsState
from demo_optax._src.local_state import local_parameters as local_parameters
from demo_optax._src.mean_over_workers import mean_over_workers as mean_over_workers
from demo_optax._src.metrics import ExchangeMetrics as ExchangeMetrics
from demo_optax._src.metrics import check_metrics as check_metrics
from demo_optax._src.metrics import exchange_metrics as exchange_metrics
from demo_optax._src.momentum import DecoupledMomentumState as DecoupledMomentumState
from demo_optax._src.optimizers import demo as demo
from demo_optax._src.optimizers import demo_adamw as demo_adamw
from demo_optax._src.optimizers import demo_muon as demo_muon
from demo_optax._src.optimizers import demo_scaled as demo_scaled
from demo_optax._src.optimizers import demo_sgd as demo_sgd
from demo_optax._src.optimizers import demo_signum as demo_signum
from demo_optax._src.optimizers import scale_by_signed_root as scale_by_signed_root
from demo_optax._src.parallel.gradients import WorkerGradients as WorkerGradients
from demo_optax._src.parallel.gradients import local_value_and_grad as local_value_and_grad
from demo_optax._src.parallel.gradients import worker_gradients as worker_gradients
from demo_optax._src.parallel.replicas import Drift as Drift
from demo_optax._src.parallel.replicas import check_replicas as check_replicas
from demo_optax._src.parallel.replicas import repair_replicas as repair_replicas
from demo_optax._src.parallel.train_step import TrainMetrics as TrainMetrics
from demo_optax._src.parallel.train_step import make_train_step as make_train_step
from demo_optax._src.parallel.worker_axis import init_model_state as init_model_state
from demo_optax._src.parallel.worker_axis import init_opt_state as init_opt_state
from demo_optax._src.parallel.worker_axis import join_state as join_state
from demo_optax._src.parallel.worker_axis import stack_workers as stack_workers
from demo_optax._src.parallel.worker_axis import state_shardings as state_shardings
from demo_optax._src.parallel.worker_axis import state_specs as state_specs
from demo_optax._src.rounds import local_steps as local_steps
from demo_optax._src.rounds import multi_steps as multi_steps
from demo_optax._src.transport import SplitTransformation as SplitTransformation
from demo_optax.accounting import dense_bytes as dense_bytes
from demo_optax.accounting import packet_bytes as packet_bytes
from demo_optax.accounting import reference_bytes as reference_bytes

try:
    __version__ = version("demo_optax")
except PackageNotFoundError:
    __version__ = "not installed"  # it runs from a folder
