"""Context parallelism for transformers models: layers stay as they are, attention spans the ranks.

A training step:

    cp = shard(model, group, method="exchange")  # refuses unsupported layers, with the reason
    batch = cp.batch(input_ids, labels, documents=lengths)  # whole batch in, this rank's part out
    loss = cp.loss(model(**batch.inputs), batch)  # the same number on every rank
"""

from parallel.comparison import Report
from parallel.transformers.batch import Batch
from parallel.transformers.log_probs import LogProbs
from parallel.transformers.preferences import ContextParallelPreferenceTrainer
from parallel.transformers.shard import Sharded, shard
from parallel.transformers.trainer import ContextParallelTrainer

__all__ = [
    "Batch",
    "ContextParallelPreferenceTrainer",
    "ContextParallelTrainer",
    "LogProbs",
    "Report",
    "Sharded",
    "shard",
]
