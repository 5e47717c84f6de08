"""What `gravac_jax.launch` consists of: processes that live and die together."""
