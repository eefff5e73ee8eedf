"""How far apart scores lie before anything is learnt."""

from __future__ import annotations

import math

from headwise.errors import InputError

__all__ = ["logit_spread"]


def logit_spread(d_model: int, d_k: int, *, input_rms: float, init_std: float, scaled: bool = True) -> float:
    """Standard deviation of q.k between unrelated inputs, when W_Q and W_K are drawn with ``init_std``.

    Each component of q and k has variance ``d_model * (init_std * input_rms)**2``; q.k sums d_k products of
    two of them, and ``scaled`` divides by sqrt(d_k), which leaves a spread that does not depend on d_k.

    Args:
        d_model: width of the input.
        d_k: width of a head.
        input_rms: root mean square of the input's components.
        init_std: standard deviation of the weights.
        scaled: with the factor 1 / sqrt(d_k).

    Raises:
        InputError: a number is not positive, or the spread overflows.

    Source: Vaswani et al. 2017, section 3.2.1, footnote 4.

    Example:
        >>> logit_spread(256, 64, input_rms=1.0, init_std=0.0625, scaled=False)
        8.0
    """
    for name, value in (("d_model", d_model), ("d_k", d_k), ("input_rms", input_rms), ("init_std", init_std)):
        if not 0 < value < math.inf:
            raise InputError(f"{name} must be a positive number, got {value!r}")
    product = init_std * input_rms
    variance = d_model * product * product
    if not math.isfinite(variance):
        raise InputError(f"init_std {init_std!r} times input_rms {input_rms!r} is too large to be squared; give less")
    return variance * (1.0 if scaled else math.sqrt(d_k))
