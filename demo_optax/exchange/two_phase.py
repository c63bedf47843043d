"""The exchange in two phases, whose traffic does not grow with the workers.

    every worker ── a part ──► each part's owner, who averages
                               and compresses ── the mean ──► everybody

Each worker owns an equal share of the blocks. It averages what all workers send of these, adds what
it could not send before, and sends everybody the largest coefficients of the sum. What those leave
out stays in its residual: error feedback on both sides, as in 1-bit Adam (Tang et al., arXiv
2102.02888) and DoubleSqueeze (Tang et al., arXiv 1905.05957).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from demo_optax import axes, checks
from demo_optax.arrays import Coefficients, IntScalar
from demo_optax.axes import AxisName
from demo_optax.compression import Plan
from demo_optax.compression.packet import (
    Layout,
    Message,
    Origin,
    Section,
    build,
    divide_rows,
    encode,
    merge_rows,
    open_heads,
)
from demo_optax.compression.plan import rebase
from demo_optax.compression.selection import make_selector
from demo_optax.compression.values import VALUE_CODINGS, ValueCoding
from demo_optax.exchange import collectives
from demo_optax.exchange.averaging import Shared, average, clip_factor, largest_norm, read
from demo_optax.exchange.protocol import (
    Aggregate,
    Mean,
    Sent,
    SparseSum,
    Taken,
    Traffic,
    own_numbers,
)
from demo_optax.metrics import ExchangeMetrics, summarise
from demo_optax.participation import reset_nonfinite_blocks


class TwoPhaseState(NamedTuple):
    """What an owner keeps.

    Attributes:
      residual: for each section what it has yet to send of the blocks that it owns,
        ``(blocks / workers, n)`` float32; each worker its own.
    """

    residual: tuple[Coefficients, ...]


@dataclasses.dataclass(frozen=True)
class TwoPhase:
    """Each worker averages its share of the blocks, and sends the mean back, compressed as well.

    What that leaves out stays with the owner for the next steps. The traffic is that of a packet
    and of all owners' packets together, which hardly grow with the number of workers.

    Attributes:
      axis_name: the workers' axis, a tuple of axes, or None for a single worker.
      topk_back: coefficients of each block that an owner sends back; four times ``topk`` by
        default; with shared positions the same coefficients come back.
      value_coding_back: of the values that it sends back; that of the compression by default.
      norm_limit: largest norm of a worker's message, as in `AllGather`, but only on the way to the
        owners, each of whom decides alone on its share of the blocks.

    Example:
      >>> import demo_optax
      >>> back = TwoPhase("data", topk_back=128, value_coding_back="int4")
      >>> tx = demo_optax.demo_scaled(1e-3, exchange=back)
    """

    axis_name: AxisName = None
    topk_back: int | None = None
    value_coding_back: ValueCoding | None = None
    norm_limit: float | None = None

    def __post_init__(self):
        axes.names(self.axis_name)
        if self.topk_back is not None:
            checks.static_integer("topk_back", self.topk_back, at_least=1)
            object.__setattr__(self, "topk_back", int(self.topk_back))
        if self.value_coding_back is not None:
            checks.one_of("value_coding_back", self.value_coding_back, VALUE_CODINGS)
        if self.norm_limit is not None:
            checks.in_interval("norm_limit", self.norm_limit, "[1, inf)")

    def owners(self) -> int:
        """Every worker owns a share of the blocks."""
        return axes.size(self.axis_name)

    def layout(self, plan: Plan) -> Layout:
        """The layout of the packet for one owner, without an all-gather's padding to 128 words."""
        return _layout(plan, self.owners())

    def init(self, plan: Plan) -> TwoPhaseState:
        """The residual starts at zero."""
        self._sections_back(plan)  # raises for settings that do not fit together
        zeros = [
            jnp.zeros((s.blocks, s.selector.n), jnp.float32) for s in self.layout(plan).sections
        ]
        return TwoPhaseState(axes.as_varying(tuple(zeros), self.axis_name))

    def exchange(
        self, plan: Plan, sent: Sent, state: TwoPhaseState, last: ExchangeMetrics, mean: Mean
    ) -> Aggregate:
        """Exchanges in two phases (see `Exchange.exchange`).

        Whether a packet counts is decided once, by the owner that it is for, which tells everybody.
        Where an owner's packet is damaged, its residual stays as it was, and what was sent to it
        stays with the senders. On a step on which no worker takes part nothing changes.
        """
        workers, own, step = len(sent.packets), axes.index(self.axis_name), sent.step
        every = jnp.arange(workers, dtype=jnp.int32)
        layout, back = self.layout(plan), self._layout_back(plan, workers)

        # To the owners
        dealt = collectives.deal(sent.packets, self.axis_name)
        headers, _, intact = open_heads(layout, dealt, Origin(step, every * workers + own))
        largest = largest_norm(headers, intact, self.norm_limit)
        of_share = _of_owner(plan.shared_positions(step), workers, own)
        means, weights = average(layout, dealt, intact, of_share, largest, mean)

        # The largest of what they have
        coordinates = plan.compression.coordinates
        owed, _ = reset_nonfinite_blocks(
            [
                rebase(coordinates, [x], sides, step)[0]
                for x, sides in zip(state.residual, plan.sides, strict=True)
            ]
        )
        totals = [old + new.dense() for old, new in zip(owed, means, strict=True)]
        sections = self._sections_back(plan)
        shared = [
            None if s.selector.travels else s.selector.positions(s.blocks, step) for s in sections
        ]
        positions = [
            s.selector.select(total) if at is None else at
            for s, total, at in zip(
                back.sections, totals, _of_owner(shared, workers, own), strict=True
            )
        ]
        values = [
            s.selector.take(total, at)
            for s, total, at in zip(back.sections, totals, positions, strict=True)
        ]
        fields, of_owner = encode(back.sections, Message(tuple(positions), tuple(values)))

        # To everybody
        numbers = own_numbers(workers, self.axis_name)
        mine, _, _ = open_heads(layout, sent.packets, Origin(step, numbers))
        heard = _pack_bits(weights > 0)
        extra = jnp.concatenate([jax.lax.bitcast_convert_type(largest, jnp.uint32)[None], heard])
        header = jax.tree.map(lambda x: x[0], mine)
        (packet,) = build(
            back, header, fields, of_owner, jnp.array(True), Origin(step, own[None]), extra
        )
        packets = collectives.gather(packet, self.axis_name)
        headers, extra, intact = open_heads(back, packets, Origin(step, every))
        found = read(back, packets, intact)
        limits = jax.lax.bitcast_convert_type(extra[:, 0], jnp.float32)
        heard = _unpack_bits(extra[:, 1:], workers) & found.counted[:, None]

        counted = heard.any(axis=0) & found.counted
        anyone = counted.any()  # else nothing happens on this step, and what owners owe waits
        of_owners = clip_factor(jnp.sqrt(mine.message), limits)
        factors = sent.factor * jnp.where(heard[:, own] & anyone, of_owners, 0.0)
        arrives = found.counted[own] & anyone
        kept = zip(back.sections, totals, *of_owner, owed, strict=True)
        return Aggregate(
            mean=[
                SparseSum(
                    (merge_rows(at, s.blocks) if known is None else known)[None],
                    jnp.where(anyone, merge_rows(v, s.blocks), 0.0)[None],
                    s.selector,
                )
                for s, known, at, v in zip(sections, shared, *found.message, strict=True)
            ],
            taken=[
                Taken(
                    sent.message,
                    [
                        jnp.repeat(factors, share.blocks)[: s.blocks, None]
                        for s, share in zip(plan.sections, layout.sections, strict=True)
                    ],
                )
            ],
            state=TwoPhaseState(
                tuple(
                    jnp.where(arrives, s.selector.add(total, at, -v), old)
                    for s, total, at, v, old in kept
                )
            ),
            metrics=summarise(headers, counted, jnp.where(found.counted, packets[:, 0], 0), last),
        )

    def traffic(self, plan: Plan, workers: int) -> Traffic:
        """A part to each owner, and each owner's packet to everybody."""
        dealt = 4 * workers * _layout(plan, workers).words
        gathered, others = 4 * self._layout_back(plan, workers).words, workers - 1
        return Traffic(dealt + gathered, (dealt / workers + gathered) * others, 2 * others)

    def _sections_back(self, plan: Plan) -> list[Section]:
        """The sections of all that the owners send back."""
        sent = plan.compression
        # A selector of any block, only to ask whether positions travel.
        travels = make_selector(sent.selection, sent.topk + 1, sent.topk, sent.seed, 0).travels
        if self.topk_back is not None and not travels:
            raise ValueError(
                f"topk_back={self.topk_back} is for selections whose positions travel: with "
                f"selection={sent.selection!r} and topk={sent.topk} owners send back the very "
                "coefficients that were sent to them. Leave it out."
            )
        k = self.topk_back or 4 * sent.topk
        coding = self.value_coding_back or sent.value_coding
        return [
            Section(
                s.blocks,
                make_selector(sent.selection, s.selector.n, k, sent.seed, number)
                if s.selector.travels
                else s.selector,
                coding,
            )
            for number, s in enumerate(plan.sections)
        ]

    def _layout_back(self, plan: Plan, workers: int) -> Layout:
        """Of an owner's packet: the limit of norms and whom it has heard follow the header."""
        extra = 1 + -(-workers // 32)
        return Layout(tuple(self._sections_back(plan)), extra).share(workers)


def _layout(plan: Plan, owners: int) -> Layout:
    return Layout(plan.sections, multiple=1).share(owners)


def _of_owner(shared: Shared, owners: int, owner: IntScalar) -> Shared:
    """The shared positions of one owner's blocks."""
    return [None if at is None else divide_rows(at, owners, "edge")[owner] for at in shared]


def _pack_bits(bits: Bool[Array, "bits"]) -> UInt32[Array, "words"]:
    padded = jnp.pad(bits, (0, -len(bits) % 32)).reshape(-1, 32).astype(jnp.uint32)
    return jnp.sum(padded << jnp.arange(32, dtype=jnp.uint32)[None], axis=1, dtype=jnp.uint32)


def _unpack_bits(words: UInt32[Array, "packets words"], size: int) -> Bool[Array, "packets {size}"]:
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    return bits.reshape(len(words), -1)[:, :size] > 0
