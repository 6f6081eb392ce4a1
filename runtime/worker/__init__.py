"""The data plane: model runner and sampler."""
