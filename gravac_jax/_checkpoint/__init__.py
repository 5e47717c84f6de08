"""What a checkpoint holds: named arrays (`named_arrays.py`) and a label (`labels.py`).

`layout.py` turns the buckets of a run into leaves, and changes the number of replicas.
Orbax's files are in `gravac_jax.checkpoint`.
"""
