"""What does XLA make of a training step for TPUs and GPUs?"""
