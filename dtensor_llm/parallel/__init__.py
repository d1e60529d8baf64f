"""One strategy a file: idea, paper, placements, collectives, and the code that applies them."""
