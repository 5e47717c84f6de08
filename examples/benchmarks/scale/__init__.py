"""How long should steps of many hosts take? A model, with its assumptions."""
