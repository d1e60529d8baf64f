"""What bench_step.py times ours against."""
