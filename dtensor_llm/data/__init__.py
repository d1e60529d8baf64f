"""Training data: batch(step) is a pure function of the seed and the step, whatever the mesh.

documents.py opens a file, sources.py finds the files that --data names, samples.py splits them into
training and validation and cuts samples, dataset.py puts the samples in order.
"""

from dtensor_llm.data.dataset import Batch, Dataset, load, problems, shuffled
from dtensor_llm.data.documents import DataError
from dtensor_llm.data.samples import IGNORED_LABEL

__all__ = ["IGNORED_LABEL", "Batch", "DataError", "Dataset", "load", "problems", "shuffled"]
