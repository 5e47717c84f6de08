"""What does selection cost, beside one pass over memory and beside sorting?"""
