"""Hyper-parameters of the LSTM."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """GraVAC's third workload (Tyagi and Swany, 2023, Table 1).

    The paper states layers, width, length, batch, momentum, decay and learning rate.

    Args:
      layers: The number of LSTM layers.
      width: The width of embedding and state.
      length: Words per window, which gradients go back through.
      rows: Tracks of the text per replica.
      learning_rate: The learning rate; fixed, but for a warm-up.
      warm_up_steps: Steps in which it rises from 0; the paper mentions none.
      momentum: The momentum of SGD.
      weight_decay: Decay that is added to the gradient.
      clip: The bound of the averaged gradient's norm; the paper mentions none.
      dropout: The share of entries dropped before, between and after layers; the paper
        mentions none. Zaremba et al., 2014, have 0.65 at this size.
      steps: Steps of a run; the paper's curves go as far.
      evaluate_every: Steps from one evaluation to the next.
      evaluation_rows: Tracks of the held-out text per replica; arbitrary.
    """

    layers: int = 2
    width: int = 1500
    length: int = 35
    rows: int = 20
    learning_rate: float = 0.1
    warm_up_steps: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None
    dropout: float = 0.0
    steps: int = 20_000
    evaluate_every: int = 500
    evaluation_rows: int = 4


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
