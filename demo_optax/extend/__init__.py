"""What a selection, a coding or an exchange of one's own is made of."""

from demo_optax._src.compression.values import Coding as Coding
from demo_optax._src.compression.values import Quantiser as Quantiser
from demo_optax._src.exchange.collectives import declare_equal as declare_equal
from demo_optax._src.exchange.protocol import Aggregate as Aggregate
from demo_optax._src.exchange.protocol import Traffic as Traffic
