"""Plan a training run: what a model will save at a batch size, per layer and kind, and which methods fit a memory.

The step is run on fake tensors, which have shapes and no values, so nothing is allocated and a ResNet-50 at batch 256
takes a second. What a method makes of the values cannot be known without values: that comes from a probe, a few real
steps with a small batch.
"""
