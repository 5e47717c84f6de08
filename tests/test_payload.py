import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _payload
from gravac_jax._payload import Payload

add_up = jax.jit(_payload.add_up, static_argnums=1)
pack = jax.jit(_payload.pack)
unpack = jax.jit(_payload.unpack)

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5)


@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(bits=BITS)
def test_any_32_bits_survive_the_journey(bits):
    # Infinities, denormals, both zeros and NaN with all their payloads among them.
    values = np.array(bits, np.uint32).view(np.float32)
    indices = np.array([9, 0, 2**31 - 1, 3, 4], np.int32)
    arrived = unpack(pack(Payload(values, indices)))
    assert np.asarray(arrived.values).tobytes() == values.tobytes()
    assert arrived.indices.tolist() == indices.tolist()


def test_an_entry_weighs_what_it_is_said_to():
    payload = Payload(jnp.zeros(7), jnp.zeros(7, jnp.int32))
    assert pack(payload).nbytes == 7 * _payload.ENTRY_BYTES


def test_what_is_taken_and_what_is_left_are_the_bucket():
    bucket, indices = jnp.array([1.0, -2.0, 3.0, -4.0]), jnp.array([3, 0])
    payload = _payload.take(bucket, indices)
    assert payload.values.tolist() == [-4.0, 1.0]
    assert payload.indices.tolist() == [3, 0]
    assert _payload.drop(bucket, payload).tolist() == [0.0, -2.0, 3.0, 0.0]


def test_entries_meet_where_they_belong():
    packed = jnp.stack(
        [
            pack(Payload(jnp.array([1.0, 2.0]), jnp.array([4, 0]))),
            pack(Payload(jnp.array([8.0, 16.0]), jnp.array([0, 2]))),
        ]
    )
    assert add_up(packed, 5).tolist() == [10.0, 0.0, 16.0, 0.0, 1.0]


def test_payloads_are_added_in_the_order_of_the_replicas():
    # Added from the back, or pairwise, the small one would survive.
    values = np.float32([2.0**30, 1.0, -(2.0**30)])
    packed = jnp.stack(
        [pack(Payload(x[None], jnp.zeros(1, jnp.int32))) for x in values]
    )
    assert add_up(packed, 1) == 0
    assert add_up(packed[::2], 1) == 0
    assert add_up(packed[jnp.array([0, 2, 1])], 1) == 1
