"""A swarm: workers that come and go, without a collective, over any object store."""

from demo_optax.swarm.member import Left as Left
from demo_optax.swarm.member import Member as Member
from demo_optax.swarm.metrics import SwarmMetrics as SwarmMetrics
from demo_optax.swarm.slots import SwarmError as SwarmError
from demo_optax.swarm.store import ObjectStore as ObjectStore
from demo_optax.swarm.store import Store as Store
from demo_optax.swarm.store import StoreError as StoreError
from demo_optax.swarm.worker import SwarmWorker as SwarmWorker
