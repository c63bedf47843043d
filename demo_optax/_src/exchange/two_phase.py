"""The exchange in two phases, whose traffic does not grow with the number of workers.

    worker ── a packet for each owner ──► owner ── its result ──► every worker

Each worker owns an equal share of the blocks. It averages the messages of all workers for them,
adds its residual, and sends the largest coefficients of the total to all workers. The rest is its
new residual, which decays as a momentum does. This is error feedback on both sides, as in 1-bit
Adam (Tang et al., arXiv 2102.02888) and DoubleSqueeze (Tang et al., arXiv 1905.05957).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from demo_optax._src import axes, checks
from demo_optax._src.arrays import Coefficients, IntScalar
from demo_optax._src.axes import AxisName
from demo_optax._src.compression import Plan
from demo_optax._src.compression.bits import pack_bits, to_words, unpack_bits, words_of
from demo_optax._src.compression.packet import (
    Origin,
    PacketLayout,
    Section,
    build,
    divide_rows,
    encode,
    merge_rows,
    parse_headers,
)
from demo_optax._src.compression.plan import select, shared_positions
from demo_optax._src.compression.selection import with_count
from demo_optax._src.compression.sparse import SparseSum
from demo_optax._src.compression.values import VALUE_CODINGS, Coding, ValueCoding
from demo_optax._src.exchange import collectives
from demo_optax._src.exchange.averaging import (
    Shared,
    average,
    clip_factor,
    decode_accepted,
    medians_and_weights,
    norm_caps,
)
from demo_optax._src.exchange.protocol import Aggregate, Mean, Outbox, Traffic
from demo_optax._src.metrics import ExchangeMetrics, summarise
from demo_optax._src.participation import reset_nonfinite_blocks


class TwoPhaseState(NamedTuple):
    """State of an owner of a share of the blocks.

    For each section the residual holds the part of the mean that the owner has not sent yet,
    ``(blocks / workers, n)``. Without any section it is one empty array, for which
    ``optax.tree.map_params`` finds the residuals of a real state.
    """

    residual: tuple[Coefficients, ...] | Coefficients


@dataclasses.dataclass(frozen=True)
class TwoPhase:
    """Lets each worker average its share of the blocks and send back the mean, compressed as well.

    This is a compressed reduce-scatter followed by a compressed all-gather. The part of the mean
    that the compression leaves out stays with the owner for later steps and decays by
    ``residual_decay`` on each. The bytes that a worker sends and receives hardly grow with the
    number of workers.

    Attributes:
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.
      topk_back: number of coefficients of each block that an owner sends back, four times ``topk``
        by default. With shared positions the same coefficients come back.
      value_coding_back: coding of the values that it sends back, by default the compression's.
      norm_limit: what a worker's message may count for, as in `AllGather`. It applies in the first
        phase only, where each owner decides alone on its share of the blocks.
      residual_decay: factor of the residual on each step, in [0, 1]. With 1 nothing is ever lost,
        but the owner's results are older, and the loss was higher in our runs.

    Example:
      >>> import demo_optax
      >>> back = TwoPhase("data", topk_back=128, value_coding_back="int4")
      >>> tx = demo_optax.demo_scaled(1e-3, exchange=back)
    """

    axis_name: AxisName = None
    topk_back: int | None = None
    value_coding_back: ValueCoding | Coding | None = None
    norm_limit: float | None = None
    residual_decay: float = 0.9

    def __post_init__(self):
        axes.names(self.axis_name)
        checks.in_interval("residual_decay", self.residual_decay, "[0, 1]")
        if self.topk_back is not None:
            checks.static_integer("topk_back", self.topk_back, at_least=1)
            object.__setattr__(self, "topk_back", int(self.topk_back))
        if self.value_coding_back is not None:
            given = self.value_coding_back
            checks.named_or_own("value_coding_back", given, VALUE_CODINGS, Coding)
        if self.norm_limit is not None:
            checks.in_interval("norm_limit", self.norm_limit, "[1, inf)")
            object.__setattr__(self, "norm_limit", float(self.norm_limit))

    def packets_per_worker(self) -> int:
        """Returns the number of workers, since each of them owns a share of the blocks."""
        return axes.size(self.axis_name)

    def layout(self, plan: Plan) -> PacketLayout:
        """Returns the layout of the packet for one owner, which needs no padding to 128 words."""
        return _layout(plan, self.packets_per_worker())

    def init(self, plan: Plan) -> TwoPhaseState:
        self._result_sections(plan)  # raises for settings that do not fit together
        zeros = [
            jnp.zeros((s.num_blocks, s.selector.n), jnp.float32) for s in self.layout(plan).sections
        ]
        residual = tuple(zeros) or jnp.zeros((0, 0))
        return TwoPhaseState(axes.as_varying(residual, self.axis_name))

    def exchange(
        self,
        plan: Plan,
        outbox: Outbox,
        state: TwoPhaseState,
        previous_metrics: ExchangeMetrics,
        mean: Mean,
    ) -> Aggregate:
        """Exchanges in two phases (see `Exchange.exchange`).

        The owner alone decides whether to accept a packet, and reports its decision to all workers.
        If an owner's result is rejected, its residual does not change and the messages to it stay
        in the momenta. If no packet is accepted, nothing changes.
        """
        workers, own_id, step = len(outbox.packets), axes.index(self.axis_name), outbox.step
        worker_ids = jnp.arange(workers, dtype=jnp.int32)
        layout, result_layout = self.layout(plan), self._result_layout(plan, workers)

        # Each owner averages its share of the blocks
        packets = collectives.all_to_all(outbox.packets, self.axis_name)
        headers, _, intact = parse_headers(
            layout, packets, Origin(step, worker_ids * workers + own_id)
        )
        medians, weights = medians_and_weights(headers, intact, self.norm_limit)
        caps = norm_caps(medians, headers.weight, self.norm_limit)
        positions = _for_owner(shared_positions(plan.sections, step), workers, own_id)
        means, clip_factors = average(layout, packets, intact, positions, caps, weights, mean)

        # It adds its residual, then selects and encodes like a worker
        residual = self._residual(plan, state, step)
        kept = [self.residual_decay * x for x in residual]
        totals = [old + new.dense() for old, new in zip(kept, means, strict=True)]
        sections = self._result_sections(plan)
        shared = shared_positions(sections, step)
        selectors = [section.selector for section in sections]
        selected = select(selectors, totals, _for_owner(shared, workers, own_id))
        coded, result = encode(result_layout.sections, selected)

        # All workers get all results, each with the header of its owner's own packet
        own_headers, _, _ = parse_headers(
            layout, outbox.packets, Origin(step, own_id * workers + worker_ids)
        )
        is_accepted = pack_bits((clip_factors > 0).astype(jnp.uint32), 1)
        extra = jnp.concatenate([to_words(medians), is_accepted])
        header = jax.tree.map(lambda x: x[0], own_headers)
        origin = Origin(step, own_id[None])
        (packet,) = build(result_layout, header, coded, result, jnp.array(True), origin, extra)
        packets = collectives.gather(packet, self.axis_name)
        headers, extra, intact = parse_headers(result_layout, packets, Origin(step, worker_ids))
        results = decode_accepted(result_layout, packets, intact)

        # Find out which owner accepted which packets, and the accepted fractions
        by_owner = jax.vmap(functools.partial(unpack_bits, bits=1, count=workers))(extra[:, 2:])
        by_owner = (by_owner > 0) & results.accepted[:, None]
        # A worker is accepted if some owner accepted its packet and its own result is accepted
        accepted = by_owner.any(axis=0) & results.accepted
        any_accepted = accepted.any()
        medians = jax.lax.bitcast_convert_type(extra[:, :2], jnp.float32)
        caps = norm_caps(medians, own_headers.weight, self.norm_limit)
        clipped = clip_factor(jnp.sqrt(own_headers.message_energy), caps)
        fractions = jnp.where(by_owner[:, own_id] & any_accepted, clipped, 0.0)
        return Aggregate(
            mean=[
                SparseSum(
                    (merge_rows(at, s.num_blocks) if known is None else known)[None],
                    jnp.where(any_accepted, merge_rows(v, s.num_blocks), 0.0)[None],
                    s.selector,
                )
                for s, known, at, v in zip(sections, shared, *results.message, strict=True)
            ],
            accepted=_rows(fractions, layout, plan),
            state=TwoPhaseState(
                tuple(
                    jnp.where(
                        results.accepted[own_id] & any_accepted, s.selector.add(total, at, -v), old
                    )
                    for s, total, at, v, old in zip(
                        result_layout.sections, totals, *result, residual, strict=True
                    )
                )
                or state.residual
            ),
            metrics=summarise(
                headers, accepted, jnp.where(results.accepted, packets[:, 0], 0), previous_metrics
            ),
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """Returns the traffic of a packet to each owner and each owner's result to all workers."""
        packet, result = (
            4 * _layout(plan, workers).words,
            4 * self._result_layout(plan, workers).words,
        )
        others = workers - 1
        received, direct = (packet + result) * others, packet * others
        return Traffic(packet * workers + result, received, 2 * others, direct=direct)

    def _result_sections(self, plan: Plan) -> list[Section]:
        """Returns the sections of all owners' results together."""
        settings = plan.compression
        selectors = [section.selector for section in plan.sections]
        is_shared = [not one.sends_positions and one.k < one.n for one in selectors]
        if self.topk_back is not None and any(is_shared):
            raise ValueError(
                f"topk_back={self.topk_back} is for selections that send their positions: with "
                f"selection={settings.selection!r} and topk={settings.topk} owners send back the "
                "very coefficients that were sent to them. Leave it out."
            )
        if len({*plan.sides}) < len(plan.sides):
            raise ValueError(
                f"topk={settings.topk!r} sends different numbers of blocks of one shape, "
                f"{plan.sides}, of which an owner keeps one residual: make it give equal numbers "
                "to tensors with equal blocks, or exchange by AllGather."
            )
        coding = self.value_coding_back or settings.value_coding
        return [
            Section(
                s.num_blocks,
                with_count(s.selector, self.topk_back or 4 * s.selector.k)
                if s.selector.sends_positions
                else s.selector,
                coding,
            )
            for s in plan.sections
        ]

    def _result_layout(self, plan: Plan, workers: int) -> PacketLayout:
        """Returns the layout of an owner's result.

        The header is followed by the medians of norms and weights, from which each worker knows the
        cap on its own message, and by one bit for each worker that tells whether the owner accepted
        its packet.
        """
        return PacketLayout(tuple(self._result_sections(plan)), 2 + words_of(workers, 1)).per_owner(
            workers
        )

    def _residual(self, plan: Plan, state: TwoPhaseState, step: IntScalar) -> list[Coefficients]:
        """Returns the residual in the basis of a step; blocks that are not finite become zero."""
        momentum_format = plan.compression.momentum_format
        pairs = zip(state.residual, plan.sides, strict=True)
        residual = [momentum_format.advance(x, sides, step) for x, sides in pairs]
        return reset_nonfinite_blocks(residual)[0]


def _layout(plan: Plan, owners: int) -> PacketLayout:
    return PacketLayout(plan.sections, multiple=1).per_owner(owners)


def _for_owner(shared: Shared, owners: int, owner: IntScalar) -> Shared:
    return [None if at is None else divide_rows(at, owners, "edge")[owner] for at in shared]


def _rows(
    factors: Float32[Array, "owners"], layout: PacketLayout, plan: Plan
) -> list[Float32[Array, "_blocks 1"]]:
    """Returns, for each section, the factors of the owners of its blocks."""
    shares = zip(plan.sections, layout.sections, strict=True)
    return [jnp.repeat(factors, share.num_blocks)[: s.num_blocks, None] for s, share in shares]
