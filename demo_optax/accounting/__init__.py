"""Bytes on the wire: from shapes alone, over a link, and in the compiled program."""

from demo_optax.accounting.hlo import Collective as Collective
from demo_optax.accounting.hlo import arguments_behind as arguments_behind
from demo_optax.accounting.hlo import collectives as collectives
from demo_optax.accounting.traffic import IndexCost as IndexCost
from demo_optax.accounting.traffic import StepTime as StepTime
from demo_optax.accounting.traffic import dense_bytes as dense_bytes
from demo_optax.accounting.traffic import index_cost as index_cost
from demo_optax.accounting.traffic import packet_bytes as packet_bytes
from demo_optax.accounting.traffic import received_bytes as received_bytes
from demo_optax.accounting.traffic import reference_bytes as reference_bytes
from demo_optax.accounting.traffic import step_times as step_times
