"""Pipeline parallelism, on torch.distributed.pipelining."""
