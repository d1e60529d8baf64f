"""What a step costs before it runs, in closed form, and how to count what it really costs.

`costs` predicts the communication of a step and `recorder` counts it; tests hold the two equal, to
the byte. `placements` says where every parameter lies, read off the model as it is built for real.
`schedule` plays a pipeline schedule through, and `timelines` shows what came of it.
"""
