"""Fisher and RegMean averages: what they weigh models by is measured on the validation rows and kept on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor, nn

from sparing.jobs.disk import write_folder
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.scores import Rows
from sparing.jobs.merge.settings import Settings, letter
from sparing.jobs.merge.sources import Derived, Source
from sparing.jobs.run import Run
from sparing.valley.merging.files import TensorEntry, checkpoint, read_slices, read_tensor
from sparing.valley.merging.fisher import Fisher, squared_gradients
from sparing.valley.merging.method import Method
from sparing.valley.merging.regmean import RegMean, input_grams, linear_weights, passes

STATISTICS: Final = "statistics"  # folder in OUT, as long as the run lasts

GRAMS: Final = 1 << 30  # bytes of matrices that one pass over the rows gathers; more layers take more passes


def measured_method(settings: Settings, sources: Sequence[Source], inputs: Inputs, run: Run) -> Method:
    """The method, with what it must know of each model; one model and its gradient, or one pass, in memory."""
    found = []
    for at, source in enumerate(sources):
        place, name = settings.out / STATISTICS / letter(at), f"statistics: {letter(at)}"
        if not place.exists():
            run.forget(name)
        measure = _squares if settings.method == "fisher" else _grams
        rows = inputs.own_rows(at, len(sources))
        run.once(name, partial(_written, place, partial(measure, source=source, inputs=inputs, rows=rows)))
        files = sorted(place.glob("*.safetensors"))
        found.append({name: entry for file in files for name, entry in checkpoint(file).items()})
    if settings.method == "fisher":
        known = [{name: read_slices(name, entry) for name, entry in each.items()} for each in found]
        return Fisher(known, settings.model_weights)
    layers = linear_weights(inputs.body)
    names = _names(sources[0], inputs, layers)
    first = [names[name] for name, layer in layers.items() if name in names and not isinstance(layer, nn.Linear)]
    grams = [Derived(tuple(each), partial(_read, each)) for each in found]
    return RegMean(grams, shrink=settings.regmean.shrink, inputs_first=frozenset(first))


def _read(entries: Mapping[str, TensorEntry], name: str) -> Tensor:
    return read_tensor(name, entries[name])


def _written(place: Path, fill: Callable[[Path], object]) -> bool:
    write_folder(place, fill)
    return True


def _squares(draft: Path, source: Source, inputs: Inputs, rows: Rows) -> None:
    """Mean squared gradients of rows, under the checkpoint's names."""
    model = inputs.load_(source.items())
    found = squared_gradients(model, range(len(rows)), rows.loss)
    names = _names(source, inputs, found)
    save_file({names[name]: tensor for name, tensor in found.items() if name in names}, draft / "0.safetensors")


def _grams(draft: Path, source: Source, inputs: Inputs, rows: Rows) -> None:
    """Mean products of the inputs of linear layers, a file for each pass."""
    model = inputs.load_(source.items())
    layers = linear_weights(model)
    names = _names(source, inputs, layers)
    known = {name: layer for name, layer in layers.items() if name in names}
    for at, group in enumerate(passes(known, GRAMS)):
        found = input_grams(model, group, rows.scores)
        save_file({names[name]: gram for name, gram in found.items()}, draft / f"{at}.safetensors")


def _names(source: Source, inputs: Inputs, wanted: Mapping[str, object]) -> dict[str, str]:
    """The checkpoint's names of weights of the live model: by address, for tied weights have several names there."""
    state = inputs.body.state_dict()
    places = {state[live].data_ptr(): name for name in source if (live := inputs.name_in(state, name)) in state}
    return {name: places[state[name].data_ptr()] for name in wanted if state[name].data_ptr() in places}
