"""What a controller may believe of a step.

`compression_gain.py`: what it is worth, by the share of the gradient that it sends and
how long the rest waits. `cost_model.py`: how long it takes, predicted from bytes and
messages, and then learned from step times.
"""
