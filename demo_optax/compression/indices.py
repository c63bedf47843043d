"""Index codings: the positions of a block's ``k`` coefficients as fields of a few bits."""


def index_bits(n: int, k: int) -> int:
    """Bits per index for ``k`` of ``n`` positions; 0 where all are sent."""
    return 0 if k == n else (n - 1).bit_length()
