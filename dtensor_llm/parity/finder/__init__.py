"""Where a run first parts from the reference: step, module, microbatch, element.

| file          | what it does                                                |
|---------------|-------------------------------------------------------------|
| divergence.py | finds the step, and has it recorded and searched            |
| observe.py    | records every module's output and gradient in a step        |
| search.py     | compares them with the reference's, in the order of causes  |
| explain.py    | from what differs on each rank to one finding               |
| diagnosis.py  | guesses the class of a bug from the numbers                 |
| finding.py    | what the search comes to, in numbers and in words           |
"""
