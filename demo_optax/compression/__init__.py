"""From a momentum to the few bytes that are sent of it, and back."""

from demo_optax.compression.blocks import BlockRule as BlockRule
from demo_optax.compression.compress import Compressed as Compressed
from demo_optax.compression.compress import Known as Known
from demo_optax.compression.compress import compress as compress
from demo_optax.compression.compress import compress_layout as compress_layout
from demo_optax.compression.compress import known_positions as known_positions
from demo_optax.compression.indices import IndexCoding as IndexCoding
from demo_optax.compression.plan import Plan as Plan
from demo_optax.compression.plan import make_plan as make_plan
from demo_optax.compression.selection import Selection as Selection
from demo_optax.compression.settings import Compression as Compression
from demo_optax.compression.settings import Coordinates as Coordinates
from demo_optax.compression.sparse import Mean as Mean
from demo_optax.compression.transforms import TransformName as TransformName
from demo_optax.compression.values import Rounding as Rounding
from demo_optax.compression.values import ValueCoding as ValueCoding
