"""What `gravac_jax.probe` consists of: from timed parts of a step to a verdict.

`verdict` has what is timed and predicts the seconds of a step from it; `turns` times
programs, `ways` lists what is compared, `probing` measures it; `findings` puts the
outcome into words, `screen` into a table.
"""
