"""Exchanges, which turn the workers' messages into the same aggregate on all of them."""

from demo_optax._src.exchange.all_gather import AllGather as AllGather
from demo_optax._src.exchange.delayed import Delayed as Delayed
from demo_optax._src.exchange.protocol import Aggregate as Aggregate
from demo_optax._src.exchange.protocol import Exchange as Exchange
from demo_optax._src.exchange.protocol import Outbox as Outbox
from demo_optax._src.exchange.two_phase import TwoPhase as TwoPhase
