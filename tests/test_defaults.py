"""What `gravac.transform` takes for arguments that are left out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gravac_jax as gravac

SLOW = gravac.WireCost(bytes_per_second=1.0)
PARAMS = {"w": jnp.ones((256, 128))}
UP_TO_256 = gravac.geometric(4, 256)
AT_OWN_PARAMS = gravac.Fastest(UP_TO_256, largest_at_shared=16)
ONE_BIT = gravac.QuantizedAllReduce(least_bits=1)
TWO_BITS = gravac.QuantizedAllReduce()
SPARSE = gravac.AllGather(gravac.Threshold())
STEPS = gravac.Steps(optax.sgd(0.1))
FORGETS = gravac.Steps(optax.sgd(0.1), residual_decay=0.9)
MASKS = gravac.Momentum(0.9, masking=True)

# Arguments, and the exchange and the controller that they bring.
DEFAULTS = {
    "nothing": ({}, ONE_BIT, AT_OWN_PARAMS),
    "few bits": ({"exchange": TWO_BITS}, TWO_BITS, AT_OWN_PARAMS),
    "a controller": (
        {"controller": gravac.Fastest()},
        TWO_BITS,
        gravac.Fastest(),
    ),
    "a high factor": ({"controller": gravac.Fixed(64)}, SPARSE, gravac.Fixed(64)),
    "steps": ({"memory": STEPS}, TWO_BITS, gravac.Fastest(UP_TO_256)),
    "steps, a high factor": (
        {"memory": STEPS, "controller": gravac.Fixed(64)},
        TWO_BITS,
        gravac.Fixed(64),
    ),
    "steps that are forgotten": ({"memory": FORGETS}, TWO_BITS, gravac.Fastest()),
    "momentum": ({"momentum": 0.9}, TWO_BITS, gravac.Fastest()),
    "masked momentum": (
        {"memory": MASKS},
        SPARSE,
        gravac.Fastest(gravac.geometric(10, 1000)),
    ),
    "a compressor": (
        {"compressor": gravac.TopK()},
        gravac.AllGather(gravac.TopK()),
        gravac.Fastest(gravac.geometric(10, 1000)),
    ),
    "both": (
        {"exchange": gravac.Mixed()},
        gravac.Mixed(),
        gravac.Fastest((1.0, 4.0, 8.0, 16.0, 32.0, 100.0, 1000.0)),
    ),
}


def program(arguments):
    """Return the program of a step of two replicas, and the state before it."""
    tx = gravac.transform(wire=SLOW, **arguments)
    state = gravac.place(tx.init(PARAMS), 2)
    step = gravac.simulate(lambda state, grads: tx.update(grads, state)[::-1], 2)
    gradients = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    text = str(jax.make_jaxpr(step)(state, gradients))
    return re.sub(r"0x[0-9a-f]+", "", text), jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_is_what_is_documented(name):
    arguments, exchange, controller = DEFAULTS[name]
    others = {k: x for k, x in arguments.items() if k in ("memory", "momentum")}
    in_full = {"exchange": exchange, "controller": controller, **others}
    assert program(arguments) == program(in_full)


@pytest.mark.parametrize(
    ("own_params", "after", "highest"),
    [
        (None, optax.sgd(1e-3, momentum=0.9), 256),
        (False, optax.sgd(1e-3, momentum=0.9), 16),
        (None, optax.adagrad(1e-3), 16),
    ],
    ids=["own", "shared", "shared, since what comes after is not linear"],
)
def test_on_a_very_slow_network_entries_wait_at_own_params_alone(
    own_params, after, highest
):
    step = gravac.train_step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2),
        optax.chain(gravac.transform(wire=SLOW), after),
        2,
        own_params=own_params,
    )
    state, taken = step.init(PARAMS), []
    with jax.numpy_dtype_promotion("standard"):  # which optax.adagrad needs
        for batch in np.random.default_rng(0).standard_normal((30, 4, 256), np.float32):
            *state, _ = step(*state, batch)
            taken.append(float(optax.tree.get(state[1], "StepInfo").factor))
    assert max(taken) == taken[-1] == highest
