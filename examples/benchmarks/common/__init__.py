"""What all benchmarks share: to record, to time in turns, to train, and to report."""
