"""Context parallelism for a model of transformers: its layers stay, their attention goes over the
ranks of a group.

cp = shard(model, group, method="exchange")               # refuses what it cannot do, by layer and
reason batch = cp.batch(input_ids, labels, documents=lengths)    # the whole sequence in, this
rank's part out loss = cp.loss(model(**batch.inputs), batch)              # the same on every rank
"""

from parallel.transformers.batch import Batch
from parallel.transformers.check import Report
from parallel.transformers.shard import Sharded, shard
from parallel.transformers.trainer import ContextParallelTrainer

__all__ = ["Batch", "ContextParallelTrainer", "Report", "Sharded", "shard"]
