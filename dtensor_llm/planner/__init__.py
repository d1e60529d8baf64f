"""What a step costs before it runs, in closed form, and how to count what it really costs.

`costs` predicts the communication of a step and `recorder` counts it; tests hold the two equal, to
the byte.
"""
