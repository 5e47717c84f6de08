"""What `gravac_jax.launch` consists of: processes that live and die together.

`processes` starts them and waits; `guardian`, a process of its own, ends them if the
launcher is gone.
"""
