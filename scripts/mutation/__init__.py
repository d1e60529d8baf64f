"""What mutate.py is made of: mutants, the rules that make them, and the server that runs tests."""
