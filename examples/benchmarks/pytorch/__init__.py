"""How long do PyTorch's steps take, with its own compression, on the same networks?"""
