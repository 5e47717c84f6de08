"""How close does a controller come to the best fixed factor, on a simulated clock?"""
