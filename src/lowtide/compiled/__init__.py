"""Compiled models: saves are named while torch.compile traces, and held by ops inside of the graphs that it compiles.

torch.compile turns a forward into one graph, whose saves it hands over all at once, after it has run. So Lowtide works
inside of that graph. While AOTAutograd traces forward and backward together, hooks name every save by the very node of
autograd that reads it (``tracing``). In the traced graph each tensor that may be held is replaced, where backward reads
it, by two ops: one that encodes it in forward as soon as it is made, and one that decodes it in backward (``rewrite``).
Between them passes a token, which owns the payload (``holding``, ``ops``). Rule 19 of docs/dataflow.md has the rest.

Nothing here is imported before ``Session.compile`` is called.
"""
