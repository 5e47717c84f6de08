"""How does each method fare, in real seconds, on a network whose bandwidth changes?"""
