"""Trains with workers that come and go, over any object store and without collectives."""

from demo_optax._src.swarm.agreement import jax_settings as jax_settings
from demo_optax._src.swarm.history import History as History
from demo_optax._src.swarm.history import read_history as read_history
from demo_optax._src.swarm.history import status as status
from demo_optax._src.swarm.history import watch_history as watch_history
from demo_optax._src.swarm.member import Left as Left
from demo_optax._src.swarm.member import Member as Member
from demo_optax._src.swarm.members_only import MembersOnly as MembersOnly
from demo_optax._src.swarm.picture import draw as draw
from demo_optax._src.swarm.records import SwarmError as SwarmError
from demo_optax._src.swarm.store import ObjectStore as ObjectStore
from demo_optax._src.swarm.store import Store as Store
from demo_optax._src.swarm.store import StoreError as StoreError
from demo_optax._src.swarm.worker import SwarmMetrics as SwarmMetrics
from demo_optax._src.swarm.worker import SwarmWorker as SwarmWorker
