import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _payload
from gravac_jax._payload import Payload


def test_what_is_taken_and_what_is_left_are_the_bucket():
    bucket, indices = jnp.array([1.0, -2.0, 3.0, -4.0]), jnp.array([3, 0])
    payload = _payload.take(bucket, indices)
    assert payload.values.tolist() == [-4.0, 1.0]
    assert payload.indices.tolist() == [3, 0]
    assert _payload.drop(bucket, payload.indices).tolist() == [0.0, -2.0, 3.0, 0.0]


def mean_of(payloads, n):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *payloads)
    rows = jnp.arange(len(payloads))
    decode = lambda row: jax.tree.map(lambda x: x[row], stacked)
    return jax.jit(lambda rows: _payload.add_up(rows, decode, jnp.zeros(n)))(rows)


def test_entries_meet_where_they_belong():
    payloads = [
        Payload(jnp.array([2.0, 1.0]), jnp.array([0, 4])),
        Payload(jnp.array([8.0, 16.0]), jnp.array([0, 2])),
    ]
    assert mean_of(payloads, 5).tolist() == [5.0, 0.0, 8.0, 0.0, 0.5]


def test_payloads_are_added_in_the_order_of_the_replicas():
    # Added from the back, or pairwise, the small one would survive.
    values = np.float32([2.0**30, 1.0, -(2.0**30), 0.0])
    payloads = [Payload(x[None], jnp.zeros(1, jnp.int32)) for x in values]
    mean = lambda *order: mean_of([payloads[i] for i in order], 1)
    assert mean(0, 1, 2, 3) == 0
    assert mean(0, 2, 1, 3) == 1 / 4
