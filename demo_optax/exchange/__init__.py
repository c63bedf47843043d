"""Exchanges: how the workers' messages become the same aggregate on all of them."""

from demo_optax.exchange.all_gather import AllGather as AllGather
from demo_optax.exchange.delayed import Delayed as Delayed
from demo_optax.exchange.protocol import Aggregate as Aggregate
from demo_optax.exchange.protocol import Exchange as Exchange
from demo_optax.exchange.protocol import Outbox as Outbox
from demo_optax.exchange.two_phase import TwoPhase as TwoPhase
