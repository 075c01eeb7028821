"""The user's own net, for files of weights, which do not say what their model is."""

from __future__ import annotations

from torch import Tensor, nn

from sparing.errors import UserError, require
from sparing.jobs.live import measuring
from sparing.jobs.subjects.entry import call_entry


def net_of(spec: str) -> nn.Module:
    """Build the net of an entry point ``module:function``, float32, in evaluation mode."""
    found = call_entry(spec, "net")
    fits = isinstance(found, nn.Module)
    require(fits, "net", f"{spec} returning a {type(found).__name__}", "it builds a model", "return a torch.nn.Module")
    net: nn.Module = found.float().eval()
    return net


def classes_of(net: nn.Module, image: Tensor) -> int:
    """Count the classes of a net by running one image, shape (1, channels, side, side)."""
    try:
        with measuring(net):
            found = net(image)
        return int(getattr(found, "logits", found).shape[-1])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        why = f"the model does not take it ({(str(error).splitlines() or [''])[0][:80]})"
        got = f"images of shape {tuple(image.shape[1:])}"
        raise UserError("data", got=got, why=why, do="pass the data it was trained for") from None
