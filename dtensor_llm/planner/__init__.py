"""What a configuration will cost, before it runs.

`placements`: where every parameter lies, read off the model as it is built for real.
"""
