"""From a momentum to the few bytes that are sent of it, and back."""

from demo_optax.compression.compress import Compressed as Compressed
from demo_optax.compression.compress import compress as compress
from demo_optax.compression.plan import Plan as Plan
from demo_optax.compression.plan import make_plan as make_plan
from demo_optax.compression.settings import Compression as Compression
