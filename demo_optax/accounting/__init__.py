"""Computes bytes and seconds over a link from shapes alone, and chooses what to send."""

from demo_optax._src.accounting.choose import Candidate as Candidate
from demo_optax._src.accounting.choose import Choice as Choice
from demo_optax._src.accounting.choose import Memory as Memory
from demo_optax._src.accounting.choose import choose as choose
from demo_optax._src.accounting.devices import estimate_compute_time as estimate_compute_time
from demo_optax._src.accounting.methods import MeasuredLoss as MeasuredLoss
from demo_optax._src.accounting.methods import Method as Method
from demo_optax._src.accounting.traffic import IndexCost as IndexCost
from demo_optax._src.accounting.traffic import StepTime as StepTime
from demo_optax._src.accounting.traffic import dense_bytes as dense_bytes
from demo_optax._src.accounting.traffic import index_cost as index_cost
from demo_optax._src.accounting.traffic import packet_bytes as packet_bytes
from demo_optax._src.accounting.traffic import preset_shapes as preset_shapes
from demo_optax._src.accounting.traffic import reference_bytes as reference_bytes
from demo_optax._src.accounting.traffic import step_times as step_times
from demo_optax._src.accounting.traffic import uplink_bytes as uplink_bytes
