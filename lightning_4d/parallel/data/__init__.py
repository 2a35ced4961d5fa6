"""Data parallelism over the axes dp_replicate and dp_shard: FSDP2, HSDP, pure replication, or a single process."""

from lightning_4d.parallel.data.initialize import MetaInitialization
from lightning_4d.parallel.data.sharding import DataParallel, DataParallelOptions, shard, sharded

__all__ = ["DataParallel", "DataParallelOptions", "MetaInitialization", "shard", "sharded"]
