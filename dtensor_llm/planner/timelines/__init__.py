"""Timelines of pipeline schedules (see `planner.schedule`), shown and compared.

comparison.py                              all schedules beside each other, for one model and batch
draw_text.py, draw_svg.py, draw_trace.py   for a terminal, a page, and Perfetto
"""
