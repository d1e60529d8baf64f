"""What two_towers.py cuts into pipeline stages."""
