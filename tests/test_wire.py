"""What really crosses the wire: the collectives of the compiled step."""

import math
import re

import jax
import numpy as np
import optax
import pytest

import demo_optax
from demo_optax._src.compression import make_plan
from tests import model, workers
from tests.sweeps import sweep

COLLECTIVE = re.compile(
    r"= (.+?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


def collectives(tx, **options):
    """``(kind, dtype, elements)`` of each collective's result in the optimised program."""
    mesh = workers.mesh_of(model.WORKERS)
    params = model.init()
    state = demo_optax.init_opt_state(tx, params, mesh)
    step = demo_optax.make_train_step(model.loss, tx, mesh, **options)
    text = jax.jit(step).lower(params, state, model.batch(0)).compile().as_text()
    return [
        (kind, dtype, math.prod(int(n) for n in dims.split(",") if n))
        for result, kind in COLLECTIVE.findall(text)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result)
    ]


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
}


@sweep("preconditioned", name=OPTIMIZERS)
def test_one_gather_of_unsigned_integers_as_large_as_accounted(name):
    tx = OPTIMIZERS[name]
    [(kind, dtype, elements)] = collectives(tx, clip_norm=1.0)
    assert (kind, dtype) == ("all-gather", "u32")
    assert 4 * elements == model.WORKERS * demo_optax.packet_bytes(tx, model.init())


def test_microbatches_share_one_gather():
    found = collectives(OPTIMIZERS["demo"], microbatches=2)
    assert [kind for kind, _, _ in found] == ["all-gather"]


def test_the_dense_baseline_reduces_every_gradient():
    tx = optax.chain(demo_optax.mean_over_workers("data"), optax.adam(1e-3))
    found = collectives(tx)
    assert {(kind, dtype) for kind, dtype, _ in found} == {("all-reduce", "f32")}
    size = 4 * sum(x.size for x in jax.tree.leaves(model.init())) + 4  # who takes part
    assert 4 * sum(n for _, _, n in found) == size == demo_optax.packet_bytes(tx, model.init())


@pytest.mark.parametrize("values, width", [("float32", 32), ("bfloat16", 16)])
def test_packet_is_a_header_indices_and_values(values, width):
    """Counted by hand: 8x8 blocks of 4 coefficients, whose indices take 6 bits each; 5 for 8x4."""
    params = {"w": np.zeros((16, 20), np.float32), "v": np.zeros(8, np.float32)}
    compression = demo_optax.Compression(4, 8, values)
    matrix = math.ceil(4 * 4 * 6 / 32) + 4 * 4 * width // 32
    edge = math.ceil(2 * 4 * 5 / 32) + 2 * 4 * width // 32
    vector = math.ceil(4 * 3 / 32) + 4 * width // 32
    words = 128 * math.ceil((5 + matrix + edge + vector) / 128)
    sections = make_plan(compression, ((16, 20), (8,))).sections
    assert sum(sum(section.word_counts) for section in sections) == matrix + edge + vector
    tx = demo_optax.decoupled_momentum(0.9, compression, axis_name="data")
    assert demo_optax.packet_bytes(compression, params) == 4 * words
    assert demo_optax.packet_bytes(tx, params) == 4 * words
