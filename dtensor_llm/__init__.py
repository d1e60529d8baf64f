"""Large-model training parallelism in pure PyTorch, proven equal to one device."""
