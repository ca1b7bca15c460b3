"""Pipeline parallelism, built on torch.distributed.pipelining."""
