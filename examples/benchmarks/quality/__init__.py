"""How much held-out loss does a method cost, per step and per byte?"""
