"""Every test process computes on one thread: the runner starts several, one for each core."""

import torch

torch.set_num_threads(1)
