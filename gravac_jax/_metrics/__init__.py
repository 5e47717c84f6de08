"""What `gravac_jax.metrics` and `gravac_jax.plot` consist of.

`scalars` fetches the figures of a step; `jsonl` and `live_view` take them, in a file
and in the terminal; `runs` reads files again.
"""
