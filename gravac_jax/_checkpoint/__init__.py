"""What `gravac_jax.checkpoint` consists of: training state by name, and in files.

`restore_checks` has all complaints; `portable` what replicas hold back, in the shapes
of the params; `ledger` all state by name; `label` what is written beside it; `reading`
puts it back into what fits.
"""
