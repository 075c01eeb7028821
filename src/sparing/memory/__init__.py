"""How many bytes a training step takes, by category: predicted without a GPU, and measured.

``predict`` runs the real step on fake tensors under a ledger of live storages; ``measure`` runs it on real ones, with
the allocator's count where there is one. Both return a ``Profile``: the composition at the peak, and at the end of
each phase.

    profile = predict(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
                      {"input_ids": ((1, 1024), torch.long), "labels": ((1, 1024), torch.long)},
                      partial(torch.optim.AdamW, lr=1e-5))
    format_bytes(profile.total)
"""

from sparing.memory.ledger import Ledger
from sparing.memory.measure import measure
from sparing.memory.predict import predict
from sparing.memory.sizes import CATEGORIES, Bytes, Profile, format_bytes, parse_bytes

__all__ = ["CATEGORIES", "Bytes", "Ledger", "Profile", "format_bytes", "measure", "parse_bytes", "predict"]
