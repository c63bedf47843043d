"""Computation of bytes on the wire and seconds per step, from shapes alone."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from demo_optax._src import axes, checks
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Compression, Plan, make_plan
from demo_optax._src.compression.blocks import block_geometry
from demo_optax._src.compression.top_k import TopK
from demo_optax._src.decoupled import decoupled_momentum
from demo_optax._src.exchange import AllGather, Delayed, Exchange
from demo_optax._src.exchange.protocol import Traffic
from demo_optax._src.fragments import plan_of_fragment, require_divides
from demo_optax._src.parallel import shards
from demo_optax._src.parallel.worker_axis import bytes_handed_over, find_layout
from demo_optax._src.transport import SplitTransformation, require_carried

PRESETS = {"300m": 1024, "1b": 2048}
"""Widths of the models in version 2 of Peng et al."""


def preset_shapes(preset: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameter shapes in version 2 of Peng et al., with 16 layers of matrices only.

    Example:
      >>> sum(math.prod(leaf.shape) for leaf in preset_shapes("300m").values())
      319946752
    """
    width = PRESETS[preset]
    layer = {
        "att_proj": (width, 3 * width),
        "att_out": (width, width),
        "ff_proj": (width, 8 * width),
        "ff_out": (4 * width, width),
    }
    shapes = {f"layers/{i}/{name}": shape for i in range(16) for name, shape in layer.items()}
    shapes = {"embedding": (50304, width)} | shapes
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def packet_bytes(
    tx_or_compression: optax.GradientTransformation | Compression,
    params,
    axis_name: AxisName = "data",
    mesh: Mesh | AbstractMesh | None = None,
    param_specs=None,
    workers: int = 1,
    exchange: Exchange | None = None,
) -> int:
    """Returns the bytes that each worker hands to the collectives of one update.

    With local steps this is the last update of a round, or that of a fragment. The update of any
    optax chain is only traced, and nothing is computed. For an optimizer without an axis, as in a
    swarm, they are the bytes of ``outbox.packet``. ``docs/explanation/bytes.md`` says what counts.

    Args:
      tx_or_compression: an optax transformation that is not yet wrapped by `stack_workers`, or a
        compression alone.
      params: arrays or shapes of the parameters.
      axis_name: the workers' axis; None for a single worker.
      mesh: the mesh, if workers have several devices.
      param_specs: PartitionSpecs or NamedShardings of the parameters inside a worker. Each device
        sends a packet of its own shards; devices with the same shards send parts of one packet.
      workers: number of workers if no mesh is given, on which `demo_optax.TwoPhase` depends.
      exchange: exchange for a compression alone; `demo_optax.AllGather` by default.

    Returns:
      The bytes, summed over the worker's devices; 0 for a single worker.

    Raises:
      ValueError: the optimizer does not exchange over ``axis_name``, and has no ``send`` and
        ``apply``; or a collective is in a ``while`` loop, whose number of passes is unknown.
      TypeError: the exchange of an optimizer without an axis cannot be carried by a transport.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
      >>> packet_bytes(Compression(topk=8, value_coding="bfloat16"), params)
      27648
    """
    tx = tx_or_compression
    if mesh is None and param_specs is not None:
        raise ValueError(
            f"param_specs={param_specs} say how a worker's devices share its parameters, but only "
            "the mesh says how many devices there are: give mesh as well."
        )
    params = checks.shapes_of("parameter", params)
    is_worker = axis_name is not None
    if is_worker and isinstance(tx, SplitTransformation) and tx.exchange.axis_name is None:
        require_carried(tx.exchange)
        tx, exchange = tx.compression, AllGather(axis_name)
    if isinstance(tx, Compression):
        exchange = exchange or AllGather(axis_name)
        if exchange.axis_name is None:
            return 0
        if mesh is None:
            return exchange.traffic(_plan(tx, params), workers).sent
        tx = decoupled_momentum(compression=tx, exchange=exchange)

    if mesh is None:
        names = axes.names(axis_name) or ("",)  # which no optimizer exchanges over
        mesh = AbstractMesh((workers, *[1] * (len(names) - 1)), names)
    layout = find_layout(tx, params, mesh, axis_name or (), param_specs)
    sent = bytes_handed_over(tx, layout)
    if sent is None:
        raise ValueError(
            "the optimizer exchanges in a jax.lax.while_loop(...), whose passes nobody knows: "
            "its bytes cannot be counted. Use jax.lax.scan, or jax.lax.fori_loop from one Python "
            "integer to another."
        )
    return sent * mesh.size // shards.num_workers(mesh, axis_name or ())


def _plan(compression: Compression, params, fragments: int | None = None) -> Plan:
    checks.real_leaves("parameter", params)
    shapes = tuple(_shapes(params))
    if fragments is None:
        return make_plan(compression, shapes)
    return plan_of_fragment(compression, shapes, fragments)


def _shapes(params) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(checks.shapes_of("parameter", params))]


def reference_bytes(params, topk: int = 32, block_side: int = 64) -> int:
    """Returns the bytes per step and worker as the published code counts them.

    A coefficient takes 12 bytes, for an int64 index and a float32 value, and blocks follow the rule
    ``"divisor"``. The byte table in version 2 of Peng et al. has these counts.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> reference_bytes(jax.ShapeDtypeStruct((1024, 4096), jnp.float32), topk=8)
      98304
    """
    blocks = [block_geometry(shape, block_side, "divisor") for shape in _shapes(params)]
    return sum(12 * b.num_blocks * min(topk, b.block_size) for b in blocks)


def dense_bytes(params, bytes_per_value: int = 4) -> int:
    """Returns the bytes of the whole gradient, which data parallelism hands to an all-reduce.

    Example:
      >>> import jax.numpy as jnp
      >>> dense_bytes({"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, bytes_per_value=2)
      144
    """
    return bytes_per_value * sum(map(math.prod, _shapes(params)))


class IndexCost(NamedTuple):
    """Bits per position by the cheapest coding, and their lower bound ``log2(C(n, k)) / k``."""

    coding: str
    bits: float
    bound: float


def index_cost(n: int, k: int) -> IndexCost:
    """Returns the bits per position for ``k`` of ``n`` coefficients.

    Example:
      >>> cost = index_cost(4096, 8)
      >>> cost.coding, cost.bits, round(cost.bound, 2)
      ('elias-fano', 10.875, 10.09)
    """
    selector = TopK(n, k)
    bits, bound = selector.position_bits(selector.coding), math.log2(math.comb(n, k))
    return IndexCost(selector.coding, bits / k, bound / k)


class StepTime(NamedTuple):
    """One step of all workers over one kind of link, or the mean over a round of local steps.

    Attributes:
      packet: bytes that each worker contributes to an exchange.
      wire: bytes that cross each worker's link, in each direction.
      transfer: seconds that these bytes take at the link's bandwidth.
      waiting: seconds of latency.
      compute: seconds of compute.
      overlaps: whether the exchange overlaps with the compute.
    """

    packet: int
    wire: int
    transfer: float
    waiting: float
    compute: float
    overlaps: bool

    @property
    def exchange(self) -> float:
        """Seconds of the exchange, whether the compute hides them or not."""
        return self.transfer + self.waiting

    @property
    def step(self) -> float:
        """Seconds of compute and exchange, or the longer of both if they overlap."""
        return max(self.compute, self.exchange) if self.overlaps else self.compute + self.exchange

    @property
    def hiding_bandwidth(self) -> float:
        """Bits per second at which the bytes on the wire and the latency take the compute's time.

        At this bandwidth or more, an exchange that overlaps with the compute costs nothing. It is
        infinite if the latency alone takes longer.
        """
        spare = self.compute - self.waiting
        return 8 * self.wire / spare if spare > 0 else math.inf


Setting = Compression | tuple[Compression, Exchange]
BYTES = {"float32": 4, "bfloat16": 2}


def _traffic(sent: Setting | str, params, workers: int, fragments: int | None) -> Traffic:
    if isinstance(sent, str):
        size = dense_bytes(params, BYTES[sent])
        return Traffic(size, 2 * size * (workers - 1) / workers, 2 * (workers - 1))
    compression, exchange = sent if isinstance(sent, tuple) else (sent, AllGather())
    if fragments is not None and isinstance(exchange, Delayed):
        raise ValueError(
            f"fragments={fragments} come late anyway, so that local_steps takes no delay with "
            f"them, but the exchange is {exchange}: leave out the delay or the fragments."
        )
    return exchange.traffic(_plan(compression, params, fragments), workers)


def uplink_bytes(
    sent: Setting | str,
    params,
    sites: int,
    workers_per_site: int = 1,
    local_steps: int = 1,
    fragments: int | None = None,
) -> float:
    """Returns the bytes that cross the uplink of a site in each direction, in the mean of a step.

    The rings go from site to site and cross each uplink once. An all-gather of packets takes them
    past all workers, ``sites * workers_per_site`` of them, so the uplink carries the packets of all
    but one. In the first of two phases each worker sends straight to each owner elsewhere.

    Args:
      sent: a setting, as in `step_times`.
      params: arrays or shapes of the parameters.
      sites: number of sites.
      workers_per_site: workers that share the uplink of a site; 1 if the site is a worker.
      local_steps, fragments: as in `step_times`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
      >>> [uplink_bytes(Compression(topk=8), params, 2, nodes) for nodes in (1, 4)]
      [44032.0, 308224.0]
    """
    checks.static_integer("sites", sites, at_least=1)
    checks.static_integer("workers_per_site", workers_per_site, at_least=1)
    checks.static_integer("local_steps", local_steps, at_least=1)
    require_divides(1 if fragments is None else fragments, local_steps, "local_steps")
    if sites == 1:
        return 0.0
    workers = sites * workers_per_site
    traffic = _traffic(sent, params, workers, fragments)
    elsewhere = (workers - workers_per_site) / (workers - 1)
    direct = traffic.direct * workers_per_site * elsewhere
    return (traffic.received - traffic.direct + direct) / (local_steps // (fragments or 1))


def step_times(
    params,
    compression: Setting | str | Mapping[str, Setting | str],
    workers: int,
    bandwidth: float,
    latency: float = 0.0,
    compute_time: float = 0.0,
    local_steps: int = 1,
    fragments: int | None = None,
) -> dict[str, StepTime]:
    """Returns the seconds per step of ordinary data parallelism and of DeMo, over the same link.

    All collectives are rings of ``N`` workers. An all-reduce of ``B`` bytes sends ``2 B (N-1)/N``
    over each link in ``2 (N-1)`` rounds, an all-gather of packets of ``B`` bytes sends ``B (N-1)``
    in ``N-1`` rounds, and each of two phases sends ``B (N-1)/N``. A delayed exchange overlaps with
    the compute of the next step, but not after local steps; that of as many fragments as local
    steps does.

    Args:
      params: arrays or shapes of the parameters.
      compression: one setting, or several by name. A setting is a compression, a pair of a
        compression and an exchange, which is `demo_optax.AllGather` by default, or the dtype of a
        dense all-reduce.
      workers: the number ``N`` of workers.
      bandwidth: bits per second of each worker's link.
      latency: seconds per round.
      compute_time: seconds of a step without any exchange.
      local_steps: steps of a round of `demo_optax.local_steps`, which ends with one exchange.
      fragments: number of fragments in which the settings exchange the progress of a round.

    Returns:
      A `StepTime` for each setting, which is ``"DeMo"`` if there is one, and for a dense all-reduce
      of the gradient: ``"AdamW, float32"`` and ``"AdamW, bfloat16"``, and in rounds of local steps
      also ``"DiLoCo, float32"`` and ``"DiLoCo, bfloat16"``.

    Raises:
      TypeError, ValueError: a number is out of range, or an exchange of fragments is delayed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> params = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
      >>> small = Compression(topk=8, value_coding="int4")
      >>> times = step_times(params, small, 16, 1e9, compute_time=0.1)
      >>> {name: round(time.step, 3) for name, time in times.items()}
      {'AdamW, float32': 0.352, 'AdamW, bfloat16': 0.226, 'DeMo': 0.102}
    """
    checks.static_integer("workers", workers, at_least=1)
    checks.static_integer("local_steps", local_steps, at_least=1)
    checks.in_interval("bandwidth", bandwidth, "(0, inf)")
    checks.in_interval("latency", latency, "[0, inf)")
    checks.in_interval("compute_time", compute_time, "[0, inf)")
    if fragments is not None:
        require_divides(fragments, local_steps, "local_steps")

    def time(sent: Setting | str, local_steps: int, fragments: int | None = None) -> StepTime:
        traffic, steps = _traffic(sent, params, workers, fragments), local_steps // (fragments or 1)
        return StepTime(
            packet=traffic.sent,
            wire=round(traffic.received / steps),
            transfer=8 * traffic.received / bandwidth / steps,
            waiting=traffic.rounds * latency / steps,
            compute=compute_time,
            overlaps=steps == 1 and (traffic.overlaps or fragments is not None),
        )

    times = {f"AdamW, {dtype}": time(dtype, 1) for dtype in BYTES}
    if local_steps > 1:
        times |= {f"DiLoCo, {dtype}": time(dtype, local_steps) for dtype in BYTES}
    settings = compression if isinstance(compression, Mapping) else {"DeMo": compression}
    return times | {name: time(sent, local_steps, fragments) for name, sent in settings.items()}
