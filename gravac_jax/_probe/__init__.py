"""What `gravac_jax.probe` consists of: from timed parts of a step to a verdict.

`ways` says what is compared, `turns` times programs, `probing` has those that are
timed; `verdict` makes the seconds of a step of them, `findings` words, `screen` a
table.
"""
