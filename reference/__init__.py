"""Every strategy on one device: plain tensors, a Python loop over the ranks. Start at README.md."""
