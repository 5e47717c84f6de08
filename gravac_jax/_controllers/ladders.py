"""Ladders: static tuples of factors that a controller may choose from.

Shapes are static in XLA, so each factor is a branch of the compiled step, and a rung is
the traced index of one. GraVAC's scaling policies are ladders: the paper multiplies a
factor at the end of a window, and here the controller climbs to the next rung.
"""

from collections.abc import Callable

from gravac_jax import _checks


def exponential(minimum: float = 10, maximum: float = 1000) -> tuple[float, ...]:
    """Return GraVAC's exponential scaling policy, after a dense first rung.

    The multiplier of `minimum` is squared at each rung: 2, 4, 16, 256, and so on.

    Args:
      minimum: the smallest compressed factor, the paper's theta_min.
      maximum: the largest factor, the paper's theta_max, and the last rung.

    Returns:
      The ladder, from factor 1 to `maximum`.

    Raises:
      ValueError: if a factor is below 1, or `minimum` is not below `maximum`.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.exponential(10, 1000)
      (1.0, 10.0, 20.0, 40.0, 160.0, 1000.0)

    References:
      Tyagi and Swany, GraVAC, IEEE CLOUD 2023, section on scaling policies.
    """
    return _climb(minimum, maximum, lambda x: x**2)


def geometric(
    minimum: float = 10, maximum: float = 2000, multiplier: float = 2
) -> tuple[float, ...]:
    """Return GraVAC's geometric scaling policy, after a dense first rung.

    Args:
      minimum: the smallest compressed factor, the paper's theta_min.
      maximum: the largest factor, the paper's theta_max, and the last rung.
      multiplier: each factor divided by the one before it; 2 in the paper.

    Returns:
      The ladder, from factor 1 to `maximum`.

    Raises:
      ValueError: if a factor is below 1, `minimum` is not below `maximum`, or
        `multiplier` is below 1.01.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.geometric(10, 2000)
      (1.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2000.0)

    References:
      Tyagi and Swany, GraVAC, IEEE CLOUD 2023, section on scaling policies.
    """
    why = "It is the step from rung to rung."
    _checks.within(multiplier, "multiplier", 1.01, 1e6, why)
    return _climb(minimum, maximum, lambda x: x * multiplier, multiplier)


def _climb(
    minimum: float,
    maximum: float,
    scale: Callable[[float], float],
    multiplier: float = 2,
) -> tuple[float, ...]:
    _checks.factor(minimum, "minimum")
    _checks.factor(maximum, "maximum")
    _checks.rising(minimum, maximum)
    factors = [1.0] if minimum > 1 else []
    factors.append(float(minimum))
    while minimum * multiplier < maximum * (1 - 1e-9):  # a product may round down
        factors.append(float(minimum * multiplier))
        multiplier = scale(multiplier)
    return (*factors, float(maximum))
