"""What bench_step.py times, and how it prints it."""
