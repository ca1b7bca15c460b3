"""Parallelism along every dimension of the mesh: context, data, pipeline and tensor."""
