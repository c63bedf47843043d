"""Types of arrays that recur, as jaxtyping writes them: dtype and named dimensions.

A name that begins with ``_`` may stand for another length in each array of a list. The tests check
all annotations with beartype; otherwise nothing is checked.
"""

from jaxtyping import Array, Bool, Float, Float32, Int32

IntScalar = Int32[Array, ""]
FloatScalar = Float32[Array, ""]
BoolScalar = Bool[Array, ""]

Positions = Int32[Array, "_blocks _k"]
Values = Float32[Array, "_blocks _k"]
Coefficients = Float[Array, "_blocks _n"]
Blocks = Float[Array, "_blocks *_sides"]
Tensor = Float[Array, "..."]
