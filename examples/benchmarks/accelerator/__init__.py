"""How long do steps and exchanges take on GPUs or TPUs, and what do they lose?"""
