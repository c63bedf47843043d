"""What really crosses the wire: the collectives of the compiled step."""

import math

import numpy as np
import pytest

import demo_optax
from benchmarks import hlo
from demo_optax._src.compression import make_plan
from tests import model, workers


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_gather_of_unsigned_integers_as_large_as_accounted(microbatches):
    tx = demo_optax.demo(1e-3, demo_optax.Compression(2, 4), axis_name="data")
    mesh, params = workers.mesh_of(model.WORKERS), model.init()
    state = demo_optax.init_opt_state(tx, params, mesh)
    options = dict(clip_norm=1.0, microbatches=microbatches)
    step = demo_optax.make_train_step(model.loss, tx, mesh, **options)
    program = step.lower(params, state, model.batch(0)).compile().as_text()
    [only] = hlo.collectives(program)
    assert (only.kind, only.dtype) == ("all-gather", "u32")
    assert only.groups == (tuple(range(model.WORKERS)),)
    assert only.operand_bytes == demo_optax.packet_bytes(tx, params)


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
