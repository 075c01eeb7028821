"""Optimizer state of blocks that stop training, and state saved and loaded by parameter name.

``torch`` optimizers keep ``optimizer.state[parameter]`` in a ``defaultdict``: reading the entry of a parameter that has
none *creates* one, so everything here asks with ``in`` and takes with ``pop``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import UserError, require
from sparing.layersample.config import StatePolicy
from sparing.layersample.offload import Offload

Values = dict[str, Any]  # state of one parameter: ``{"exp_avg": Tensor, "step": Tensor, ...}``

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Shard:
    """Local part of a sharded tensor on the host, with what is needed to make it a sharded tensor again."""

    local: Tensor
    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def back(self, local: Tensor) -> Tensor:
        """Rebuild the sharded tensor around its local part, which is on the device again."""
        from torch.distributed.tensor import DTensor

        whole: Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return whole


def is_sharded(value: object) -> bool:
    """Tell whether a value is a ``DTensor``, without importing ``torch.distributed.tensor``."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def whole(value: Tensor) -> Tensor:
    """Gather a sharded tensor from its processes; a plain one is returned as it is."""
    full: Tensor = cast("Any", value).full_tensor() if is_sharded(value) else value
    return full


def read(values: Sequence[Tensor]) -> list[float]:
    """Take single numbers from their devices, waiting for each device once."""
    if not values:
        return []
    stacked: list[float] = torch.stack([value.detach().double().to(values[0].device) for value in values]).tolist()
    return stacked


@dataclass(slots=True, eq=False)
class StateStore:
    """Applies one state policy to the parameters of an optimizer.

    "reset" drops the state of a parameter that leaves, "offload" moves it to host memory and back, "keep" leaves it
    where it is, "reset_all" is "reset" and ``clear_`` at every draw.

    Source: the policies of Pan et al. 2024 (separate runs per interval: reset_all), Soup (reset), GRASS (offload) and
    LMFlow's callback (keep).
    """

    optimizer: torch.optim.Optimizer  # the optimizer whose ``state`` is changed
    policy: StatePolicy  # what happens to state that leaves
    hosted: dict[str, Values] = field(default_factory=dict)  # state in host memory, by canonical parameter name
    offload: Offload = field(default_factory=Offload)  # how it gets there and back
    _handles: list[RemovableHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Let whoever reads the state wait for the copies under way."""
        if self.policy == "offload":
            wait = lambda *_: self.offload.copies.wait()  # noqa: E731
            hooks = (self.optimizer.register_step_pre_hook, self.optimizer.register_state_dict_pre_hook)
            self._handles = [hook(wait) for hook in hooks]

    def close(self) -> None:
        """Leave the optimizer."""
        self.offload.copies.wait()
        for handle in self._handles:
            handle.remove()

    def evict_(self, params: Mapping[str, nn.Parameter]) -> None:
        """Drop, keep or move to the host the state of parameters that stop training."""
        if self.policy == "keep":
            return
        for name, parameter in params.items():
            values = self.optimizer.state.pop(parameter, None)
            if values and self.policy == "offload":
                self.hosted[name] = {key: self._hosted(value) for key, value in values.items()}

    def restore_(self, params: Mapping[str, nn.Parameter]) -> None:
        """Bring back what ``evict_`` moved to the host; dropped state is rebuilt by the optimizer's next step."""
        for name, parameter in params.items():
            values = self.hosted.pop(name, None)
            # a state that is there already was loaded since, and is newer
            if values is not None and not self.optimizer.state.get(parameter):
                put_(self.optimizer, parameter, values, self.offload.to_device)
        self.offload.settle()

    def _hosted(self, value: Any) -> Any:
        """Send a tensor to the host; of a sharded one its local part, and anything else stays as it is."""
        if is_sharded(value):
            local = self.offload.to_host(value.to_local())
            return _Shard(local, value.device_mesh, value.placements, torch.Size(value.shape), value.stride())
        return self.offload.to_host(value) if isinstance(value, Tensor) else value

    def clear_(self) -> None:
        """Drop all state, also that of parameters that go on training."""
        self.optimizer.state.clear()
        self.hosted.clear()


def _moved(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, non_blocking=True)


def put_(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, values: Mapping[str, Any],
    move: Callable[[Tensor, torch.device], Tensor] = _moved,
) -> None:  # fmt: skip
    """Give a parameter its state, without the cast to the parameter's dtype that ``load_state_dict`` makes."""
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    # torch's optimizers keep the step count on the host, except the capturable and fused ones
    step_on_device = group.get("capturable") or group.get("fused")
    placed = dict(values)
    for key, value in values.items():
        if isinstance(value, _Shard):
            placed[key] = value.back(move(value.local, parameter.device))
        elif isinstance(value, Tensor) and (key != "step" or step_on_device) and not group.get("offloaded"):
            placed[key] = move(value, parameter.device)
    if is_sharded(parameter):
        placed = {key: _cut_as(parameter, key, value) for key, value in placed.items()}
    optimizer.state[parameter] = placed


def _cut_as(parameter: Any, key: str, value: Any) -> Any:
    """What a checkpoint has of a sharded parameter's state is this process's part: a sharded tensor again."""
    if not isinstance(value, Tensor) or is_sharded(value) or not value.ndim:
        return value
    part, whole = tuple(parameter.to_local().shape), tuple(parameter.shape)
    why, do = f"this process holds {part} of {whole}", "resume on as many processes as saved it, each from its own file"
    require(tuple(value.shape) == part, f"optimizer state {key}", tuple(value.shape), why, do)
    place = (parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
    return _Shard(value, *place).back(value.to(parameter.device))


def pack(states: Mapping[str, Values], prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split state by parameter name into tensors, for safetensors, and plain values, for JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, values in states.items():
        for key, value in values.items():
            path = f"{prefix}/{name}/{key}"
            if isinstance(value, _Shard):
                tensors[path] = value.local
            elif is_sharded(value):
                tensors[path] = value.to_local().detach()
            elif isinstance(value, Tensor):
                tensors[path] = value.detach()
            else:
                plain[path] = value
                got, why = f"a {type(value).__name__} at {path}", "only tensors, numbers and strings are saved"
                do = "use an optimizer that keeps tensors per parameter"
                require(isinstance(value, _PLAIN), "optimizer state", got, why, do)
    return tensors, plain


def unpack(entries: Mapping[str, Any], prefix: str) -> dict[str, Values]:
    """Undo ``pack``: gather the entries under ``prefix`` by parameter name."""
    states: dict[str, Values] = {}
    for path, value in entries.items():
        head, _, rest = path.partition("/")
        if head == prefix:
            name, _, key = rest.rpartition("/")
            states.setdefault(name, {})[key] = value
    return states


def named_state(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Values]:
    """Optimizer state by parameter name, of those parameters that have any."""
    return {name: optimizer.state[p] for name, p in params.items() if optimizer.state.get(p)}


def write_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a ``state_dict`` atomically to one safetensors file whose metadata hold the JSON part."""
    from safetensors.torch import save_file

    plain = {key: value for key, value in state.items() if key != "tensors"}
    tensors = {key: value.detach().cpu().contiguous() for key, value in state["tensors"].items()}
    target = Path(path)
    # several ranks or runs may write here at once: the process id keeps their partial files apart
    partial = target.with_name(target.name + f".{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"state": json.dumps(plain, sort_keys=True)})
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``write_state`` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads((file.metadata() or {})["state"])
            return dict(plain) | {"tensors": {key: file.get_tensor(key) for key in file.keys()}}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise UserError(
            "layer-sampling state", got=path, why=str(problem) or type(problem).__name__, do="give the whole checkpoint"
        ) from problem
