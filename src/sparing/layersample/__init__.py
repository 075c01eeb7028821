"""Fine-tune a language model a few blocks at a time, in the memory of those blocks: layerwise importance sampled AdamW.

Embedding, head and final norm always train; of the body, ``active`` blocks drawn anew every ``period`` optimizer steps.
Frozen blocks hold no gradient and no optimizer state. ``predict`` tells the bytes beforehand, ``Sampler`` works in any
training loop, and ``LayerSamplingCallback`` in Hugging Face's Trainer.

Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model Fine-Tuning", NeurIPS 2024
(arXiv:2403.17919).

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> sampler = Sampler(model, optimizer, LayerSampling(active=2, period=20), seed=0)
    >>> for step in range(3):
    ...     sampler.begin_step(step)
    ...     model(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> len(sampler.active)
    2
"""

from typing import TYPE_CHECKING, Any

from sparing.layersample.apply import Sampler
from sparing.layersample.backward_step import StepInBackward
from sparing.layersample.config import LayerSampling
from sparing.layersample.draws import Adaptive, Bernoulli, CostAware, Fixed, Ordered, Reshuffle, Uniform, Weighted
from sparing.layersample.importance import Importance
from sparing.layersample.price.predict import predict

if TYPE_CHECKING:
    from sparing.layersample.callback import LayerSamplingCallback

__all__ = [
    "Adaptive",
    "Bernoulli",
    "CostAware",
    "Fixed",
    "Importance",
    "LayerSampling",
    "LayerSamplingCallback",
    "Ordered",
    "Reshuffle",
    "Sampler",
    "StepInBackward",
    "Uniform",
    "Weighted",
    "predict",
]


def __getattr__(name: str) -> Any:
    """Import the callback, and with it transformers, on first use."""
    if name == "LayerSamplingCallback":
        from sparing.layersample.callback import LayerSamplingCallback

        return LayerSamplingCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
