"""How long does training take to a held-out loss, with each method on each network?"""
