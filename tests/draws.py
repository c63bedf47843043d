"""What the properties are tried on: shapes of rank 0 to 4, odd and prime sizes, small blocks.

The random transform, whose programs take long to compile, is asked for by name.
"""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import demo_optax
from tests.sweeps import slow

shapes = (
    st.lists(st.integers(1, 13), max_size=4).map(tuple).filter(lambda shape: math.prod(shape) < 500)
)
trees = st.lists(shapes, min_size=1, max_size=3).map(tuple)
chunks = st.integers(1, 8)
rules = st.sampled_from(["pad", "divisor"])
values = st.sampled_from(["float32", "bfloat16"])
seeds = st.integers(0, 10**6)
compressions = st.builds(
    demo_optax.Compression,
    topk=st.integers(1, 20),
    block_side=chunks,
    value_coding=values,
    transform=st.sampled_from(["dct", "randomized-dct", "identity"]),
    block_rule=rules,
    selection=st.sampled_from(["topk", "bins"]),
)

# With every transform, rule and selection, and sides that a block does not divide.
CASES = {
    "dct": dict(shapes=((9, 13), (5,)), compression=demo_optax.Compression(3, 4, "bfloat16")),
    "randomized-dct": dict(
        shapes=((4, 7, 3), (6, 8), ()),
        compression=demo_optax.Compression(
            2, 5, "float32", "randomized-dct", "divisor", selection="bins"
        ),
    ),
    "identity": dict(
        shapes=((10, 3, 1, 6),),
        compression=demo_optax.Compression(4, 3, "bfloat16", "identity", selection="bins"),
    ),
}


def examples(number):
    """So many examples, the same on each run; each compiles a program of its own."""
    return settings(max_examples=number, deadline=None, derandomize=True)


def cases(known, number, **drawn):
    """A test of known cases, and with `make test-all` of so many that are drawn."""

    def decorate(test):
        any_case = examples(number)(given(**drawn)(test))

        def run(case):
            any_case() if case == "drawn" else test(**known[case])

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("case", [*known, slow("drawn")])(run)

    return decorate


def gradients(seed, shapes, workers=None, dtype=np.float32):
    """A list of random tensors, with an axis of workers in front where there are several."""
    random = np.random.default_rng(seed)
    front = () if workers is None else (workers,)
    return [random.normal(size=(*front, *shape)).astype(dtype) for shape in shapes]


def start(tx, shapes, workers=None):
    """``tx.update``, compiled, and the first state; for several workers stacked under vmap."""
    zeros, init, update = [np.zeros(shape, np.float32) for shape in shapes], tx.init, tx.update
    if workers is not None:
        own = functools.partial(jax.vmap, axis_name="data")
        init, update = own(init, in_axes=None, axis_size=workers), own(update)
    # Each program runs once or twice: most of the time goes into its compilation.
    return jax.jit(update, compiler_options={"xla_backend_optimization_level": 0}), init(zeros)
