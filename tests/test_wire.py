"""What really crosses the wire: the collectives of the compiled step."""

import math

import jax
import numpy as np
import optax
import pytest

import demo_optax
from benchmarks import hlo
from demo_optax._src.compression import make_plan
from tests import model, workers
from tests.sweeps import sweep


def collectives(tx, **options):
    """Those of the optimised program of a step, and its mesh."""
    mesh = workers.mesh_of(model.WORKERS)
    params = model.init()
    state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(model.loss, tx, mesh, **options)
    return hlo.collectives(step.lower(params, state, model.batch(0)).compile().as_text())


OPTIMIZERS = {
    "demo": demo_optax.demo(1e-3, demo_optax.Compression(2, 4), axis_name="data"),
    "everything": demo_optax.demo(1e-3, demo_optax.Compression(64, 8), axis_name="data"),
    "adamw": demo_optax.demo_adamw(
        1e-3, demo_optax.Compression(7, 8, transform="random"), axis_name="data"
    ),
    "preconditioned": demo_optax.demo(
        1e-3,
        demo_optax.Compression(3, 4, value_coding="bfloat16"),
        precondition=optax.scale_by_rms(),
        axis_name="data",
    ),
    "int4": demo_optax.demo(1e-3, demo_optax.Compression(5, 16, "int4"), axis_name="data"),
    "sign of bins": demo_optax.demo(
        1e-3, demo_optax.Compression(5, 16, "sign", selection="bins"), axis_name="data"
    ),
    "shared positions": demo_optax.demo(
        1e-3, demo_optax.Compression(5, 16, "int8", selection="random"), axis_name="data"
    ),
}


@sweep("preconditioned", name=OPTIMIZERS)
def test_one_gather_of_unsigned_integers_as_large_as_accounted(name):
    tx = OPTIMIZERS[name]
    [only] = collectives(tx, clip_norm=1.0)
    assert (only.kind, only.dtype) == ("all-gather", "u32")
    assert only.groups == (tuple(range(model.WORKERS)),)
    assert only.operand_bytes == demo_optax.packet_bytes(tx, model.init())


def test_microbatches_share_one_gather():
    [only] = collectives(OPTIMIZERS["demo"], microbatches=2)
    assert only.kind == "all-gather"


def test_the_dense_baseline_reduces_every_gradient():
    tx = optax.chain(demo_optax.mean_over_workers("data"), optax.adam(1e-3))
    found = collectives(tx)
    assert {(one.kind, one.dtype) for one in found} == {("all-reduce", "f32")}
    size = 4 * sum(x.size for x in jax.tree.leaves(model.init())) + 4  # who takes part
    assert sum(one.operand_bytes for one in found) == size
    assert size == demo_optax.packet_bytes(tx, model.init())


@pytest.mark.parametrize("selection", ["topk", "random", "slicing"])
@pytest.mark.parametrize("values, width", [("float32", 32), ("bfloat16", 16)])
def test_packet_is_a_header_indices_and_values(values, width, selection):
    """Counted by hand: 8x8 blocks of 4 coefficients, whose indices take 6 bits each; 5 for 8x4.

    Positions that all workers know take none.
    """
    params = {"w": np.zeros((16, 20), np.float32), "v": np.zeros(8, np.float32)}
    compression = demo_optax.Compression(4, 8, values, selection=selection)
    sends = selection == "topk"
    matrix = math.ceil(4 * 4 * 6 * sends / 32) + 4 * 4 * width // 32
    edge = math.ceil(2 * 4 * 5 * sends / 32) + 2 * 4 * width // 32
    vector = math.ceil(4 * 3 * sends / 32) + 4 * width // 32
    words = 128 * math.ceil((5 + matrix + edge + vector) / 128)
    sections = make_plan(compression, ((16, 20), (8,))).sections
    assert sum(sum(section.word_counts) for section in sections) == matrix + edge + vector
    tx = demo_optax.decoupled_momentum(0.9, compression, axis_name="data")
    assert demo_optax.packet_bytes(compression, params) == 4 * words
    assert demo_optax.packet_bytes(tx, params) == 4 * words
