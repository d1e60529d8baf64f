"""Pipeline schedules as data: a list of actions for each rank.

actions.py        what an action is, and a schedule of them
kinds.py          the seven schedules by name: stages of the ranks, microbatches they admit
torch_orders.py   the seven schedules, as torch executes them
check.py          refuses a schedule that cannot run, showing its grid
csv_files.py      reads and writes torch's CSV format
closed_forms.py   what the papers say of bubbles and live activations
"""
