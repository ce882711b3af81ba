"""Methods over paired seeds: the same first weights, the same batches, so that a difference is that of the methods."""
