"""The path from a momentum to the few bytes that are sent of it, and back."""

from demo_optax._src.compression.blocks import BlockRule as BlockRule
from demo_optax._src.compression.plan import Plan as Plan
from demo_optax._src.compression.plan import make_plan as make_plan
from demo_optax._src.compression.selection import Selection as Selection
from demo_optax._src.compression.settings import Compression as Compression
from demo_optax._src.compression.transforms import TransformName as TransformName
from demo_optax._src.compression.values import ValueCoding as ValueCoding
