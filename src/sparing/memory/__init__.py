"""How many bytes a training step takes, by category: predicted without a GPU, and measured.

``predict`` runs the real step on fake tensors under a ledger of live storages; ``measure`` runs it on real ones, with
the allocator's count where there is one. Both return a ``Profile``: the composition at the peak, and at the end of
each phase.

Example:
    >>> import torch
    >>> from functools import partial
    >>> batch = {"input": ((8, 512), torch.float32)}
    >>> loss = lambda model, batch: model(batch["input"]).sum()
    >>> profile = predict(partial(torch.nn.Linear, 512, 512), batch, torch.optim.AdamW, loss=loss)
    >>> format_bytes(profile.total)
    '6.0 MiB'
"""

from sparing.memory.ledger import Ledger
from sparing.memory.measure import measure
from sparing.memory.predict import predict
from sparing.memory.sizes import CATEGORIES, Bytes, Profile, format_bytes, parse_bytes

__all__ = ["CATEGORIES", "Bytes", "Ledger", "Profile", "format_bytes", "measure", "parse_bytes", "predict"]
