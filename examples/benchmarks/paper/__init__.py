"""What do methods reach on the paper's workloads, in quality, bytes and factors?"""
