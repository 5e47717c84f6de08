"""What a controller may believe of a step.

`compression_gain.py`: the share of the gradient that was sent. `progress.py`: what a
step is worth whose gradient waits. `cost_model.py`: its seconds, by bytes and messages.
`step_time_filter.py`: its seconds, as they are measured.
"""
