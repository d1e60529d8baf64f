"""What a configuration will cost, worked out before anything runs.

schedule.py   when each rank of a pipeline does what: bubbles, live activations, messages
schedules/    the action lists themselves: torch's seven, those from a file, what makes one unsound
"""
