"""From a momentum to the few bytes that are sent of it, and back."""

from demo_optax.compression.blocks import BlockGeometry as BlockGeometry
from demo_optax.compression.blocks import block_geometry as block_geometry
from demo_optax.compression.scheme import Compression as Compression
