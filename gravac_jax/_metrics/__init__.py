"""Parts of `gravac_jax.metrics` and `gravac_jax.plot`: figures, and their files.

`scalars` fetches the figures of a step; `jsonl` and `live_view` take them, in a file
and in the terminal; `runs` reads files again.
"""
