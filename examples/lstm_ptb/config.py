"""What the LSTM is trained with."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """GraVAC's third workload (Tyagi and Swany, 2023, Table 1).

    The paper states layers, width, length, batch, momentum, decay and learning rate.
    """

    layers: int = 2
    width: int = 1500
    """Of embedding and state."""
    length: int = 35
    """Words per window, which gradients go back through."""
    rows: int = 20
    """Tracks of the text per replica."""
    learning_rate: float = 0.1
    """Fixed, but for a warm-up."""
    warm_up_steps: int = 0
    """In which it rises from 0; the paper mentions none."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None
    """Largest global norm of the averaged gradient; the paper mentions none."""
    dropout: float = 0.0
    """Share of entries, before, between and after layers; the paper mentions none.
    Zaremba et al., 2014, have 0.65 at this size."""
    steps: int = 20_000
    """As far as the paper's curves go."""
    evaluate_every: int = 500
    evaluation_rows: int = 4
    """Tracks of the held-out text per replica; arbitrary."""


PRESETS = {
    "paper": Config(),
    # Zaremba et al.'s small width, and their 20 tracks in all with four replicas; half
    # an epoch. The learning rate is the best of 1, 2 and 4 for dense steps, after 200
    # and without a warm-up; without one a run with the default's factors stayed where
    # words have their frequencies. Its length is arbitrary.
    "small": Config(
        width=200,
        rows=5,
        learning_rate=2.0,
        warm_up_steps=50,
        clip=1.0,
        weight_decay=0.0,
        steps=700,
        evaluate_every=175,
    ),
}
