"""Which entries of a bucket are sent, without sorting it: marks, and what they mark.

`quantile` finds the magnitude that k entries reach, `compaction` the places of those
that do, `collect` their values, `curve` what other factors would have sent.
"""
