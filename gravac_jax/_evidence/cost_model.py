"""The cost model: from bytes and messages to seconds.

Until the first measured step time arrives, it predicts the seconds of a step.
"""

import dataclasses

from gravac_jax import _refuse


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Predicts seconds from bytes and messages: the alpha-beta model.

    Measured step times (`update(..., step_seconds=...)`) replace it as soon as the
    first one arrives.

    Args:
      bytes_per_second: bandwidth of one replica's link. Default: 1 Gbit/s, commodity
        Ethernet.
      latency_seconds: latency of one message. The default, 0.1 ms, is arbitrary.
      compute_seconds: length of a step without any exchange. The default, 10 ms, is
        arbitrary; it keeps the model from promising more speed than a step can give.
      selection_seconds: time that a compressed step needs to choose what it sends. The
        default, 1 ms, is arbitrary.

    Raises:
      ValueError: if a figure is negative or not a number.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.WireCost(latency_seconds=1e-3).step_seconds(12.5e6, messages=1)
      0.111
    """

    bytes_per_second: float = 125e6
    latency_seconds: float = 1e-4
    compute_seconds: float = 1e-2
    selection_seconds: float = 1e-3

    def __post_init__(self) -> None:
        hint = "see gravac.WireCost for units"
        for name, x in vars(self).items():
            low, high = (1, 1e15) if name == "bytes_per_second" else (0, 1e6)
            _refuse.number(x, name, hint, low=low, high=high)

    def step_seconds(self, wire_bytes: float, messages: float) -> float:
        """Return the seconds of a dense step with such an exchange."""
        return sum(self.parts(wire_bytes, messages, is_dense=True))

    def parts(
        self, wire_bytes: float, messages: float, is_dense: bool
    ) -> tuple[float, float, float, float]:
        """Return the seconds of compute, selection, messages and bytes in a step."""
        return (
            self.compute_seconds,
            0.0 if is_dense else self.selection_seconds,
            self.latency_seconds * messages,
            wire_bytes / self.bytes_per_second,
        )
