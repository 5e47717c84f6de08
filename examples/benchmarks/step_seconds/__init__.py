"""How long does a step take on a network, and where does its time go?"""
