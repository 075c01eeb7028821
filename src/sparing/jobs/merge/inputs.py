"""What models are measured on: rows to choose by, other rows to report on, and a live model that takes any weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from sparing.errors import UserError, require
from sparing.jobs.lm.models import Head, load_model, load_tokenizer, most_positions, vocabulary
from sparing.jobs.merge.scores import Rows
from sparing.jobs.merge.settings import Settings
from sparing.jobs.merge.sources import Source
from sparing.jobs.merge.text_rows import joined, text_rows
from sparing.jobs.subjects.folders import Encoder, call_entry, encoder_of, kind_of, open_folder
from sparing.jobs.subjects.images import IMAGES, ImageFormat, image_format_of, image_rows, prepared
from sparing.jobs.torch_state import measuring
from sparing.valley.merging.merge import merged_tensor
from sparing.valley.merging.method import Method
from sparing.valley.scans.batch_norm import batch_norms, refresh_

CALIBRATION_BATCH = 256  # training images in a batch (count)

# What a folder is loaded as, and what is measured of it beside the next token, in words.
HEADS: Mapping[Encoder | None, Head] = {
    None: "causal language model", "masked": "masked language model", "pairs": "sequence-to-sequence model",
}  # fmt: skip
WORDS: Mapping[Encoder | None, str] = {
    None: "", "masked": ", of which 15 % are masked and filled in",
    "pairs": ", which are read, and answered with the right tokens before each",
}  # fmt: skip

LENGTH = 128  # tokens in a row, where the model has as many positions (count)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Rows, and the one live model that everything is measured with."""

    body: nn.Module  # the architecture, in float32 and evaluation mode; its weights are those measured last
    validation: Rows  # what a way, a scale or a member is chosen by
    test: Rows  # what is reported, and nothing is chosen by
    metric: Literal["loss", "error"]  # the one that the page leads with
    source: str  # the data in words
    calibrate: Sequence[Tensor] = ()  # batches of training inputs that batch-norm statistics are taken from
    tasks: tuple[str, ...] = ()  # names of texts, where there are several; each has an equal part of the rows, in order

    def by_task(self, rows: Tensor) -> dict[str, Tensor]:
        """Cut what is known of rows, such as their scores, by task."""
        return dict(zip(self.tasks, rows.chunk(len(self.tasks)), strict=True)) if self.tasks else {}

    def own_rows(self, at: int, models: int) -> Rows:
        """Validation rows of a model's own task, where each of ``models`` has one; else all."""
        if len(self.tasks) != models:
            return self.validation
        return self.validation.take(self.by_task(torch.arange(len(self.validation)))[self.tasks[at]])

    @property
    def refreshes(self) -> bool:
        """Whether the model has batch norms whose statistics must follow merged weights."""
        return bool(batch_norms(self.body))

    @torch.no_grad()
    def load_(self, tensors: Iterable[tuple[str, Tensor]], *, refresh: bool = False) -> nn.Module:
        """Load other weights into the live model; ``refresh`` takes batch-norm statistics anew."""
        state = self.body.state_dict()
        # By address, for tied weights are in the file once and in the model twice.
        missing = {value.data_ptr() for value in state.values() if value.numel()}
        for name, tensor in tensors:
            target = state.get(self.name_in(state, name))
            if target is None or target.shape != tensor.shape:
                why = "the model has no such weight: another net, or one that renames its weights on loading"
                got = f"{name!r} of shape {tuple(tensor.shape)}"
                raise UserError("data", got=got, why=why, do="omit --data to merge without measuring")
            target.copy_(tensor)
            missing.discard(target.data_ptr())
        require(not missing, "checkpoint", "too few tensors", "the model has more weights", "save it again")
        if refresh and self.refreshes:
            refresh_(self.body, self.calibrate)
        return self.body

    def name_in(self, state: Mapping[str, Tensor], name: str) -> str:
        """The live model's name of a tensor: checkpoints may lack, or have, the prefix of the model's inner part."""
        prefix = f"{getattr(self.body, 'base_model_prefix', '')}."
        known = (name, f"{prefix}{name}", name.removeprefix(prefix))
        return next((one for one in known if one in state), name)

    def load_merged_(self, method: Method, sources: Sequence[Source], base: Source | None) -> nn.Module:
        """Load merged weights into the live model, in the number format that the merge will have on disk."""
        return self.load_(
            ((n, merged_tensor(method, n, [s[n] for s in sources], base[n] if base else None)) for n in sources[0]),
            refresh=True,
        )


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


def _half(count: int, what: str, settings: Settings) -> int:
    """How many rows are for choosing; as many at least are for reporting."""
    # the first half chooses, the second reports: a choice on its own test rows looks too good
    enough = count >= 4
    do = "pass more of it, or a smaller --length"
    require(enough, "data", f"{count} {what}", "half are to choose by and half to report on", do)
    return min(settings.rows, count // 2)


def _of_text(settings: Settings, folder: Path, encoder: Encoder | None) -> Inputs:
    body = load_model(folder, dtype=torch.float32, head=HEADS[encoder])
    limit = most_positions(body)
    length = settings.length or min(LENGTH, limit or LENGTH)
    fits = limit is None or length <= limit
    require(fits, "length", length, f"the model has {limit} positions", f"pass --length {limit} or less")
    tokenizer, names = load_tokenizer(folder), settings.data
    most = 2 * settings.rows
    texts = [text_rows(encoder, name, tokenizer, rows=most, length=length, seed=settings.seed) for name in names]
    count = min(map(len, texts))
    # Tasks weigh the same: of a longer text rows are taken evenly
    texts = [text.take(torch.linspace(0, len(text) - 1, count).long()) for text in texts]
    known, highest = vocabulary(body), max(text.highest for text in texts)
    why = f"the model knows {known} tokens, its tokenizer gives token {highest}"
    require(highest < known, "models", folder, why, "use the tokenizer that belongs to the model")
    if encoder is not None:
        _try(body, texts[0], folder)
    half = _half(count, f"rows of {length} tokens", settings)
    files = [Path(name).name for name in names]
    tasks = tuple(files if len(set(files)) == len(files) else names)
    each = "each of " if len(tasks) > 1 else ""
    source = f"{count - half} rows of {length} tokens of {each}{', '.join(tasks)}{WORDS[encoder]}"
    validation, test = (joined([text.take(part) for text in texts]) for part in (slice(half), slice(half, None)))
    return Inputs(body.eval(), validation, test, "loss", source, tasks=tasks if len(tasks) > 1 else ())


def _try(body: nn.Module, rows: Rows, folder: Path) -> None:
    """Refuse, before anything is done, an encoder that cannot read its rows."""
    try:
        rows.take(slice(1)).scores(body)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        why = f"it does not read such rows ({(str(error).splitlines() or [''])[0][:80]})"
        raise UserError("models", got=folder, why=why, do="pass a smaller --length, or omit --data") from None


def _of_images(settings: Settings, body: nn.Module, image_format: ImageFormat | None, data: str) -> Inputs:
    train, test = image_rows(data, rows=2 * settings.rows, calibration=settings.calibration)
    if image_format is None:
        colour = train[0].ndim == 4
        pixels = train[0].float() / 255
        dims = (0, 1, 2) if colour else None
        mean, deviation = (value.flatten().tolist() for value in (pixels.mean(dims), pixels.std(dims)))
        image_format = ImageFormat(None, 3 if colour else 1, tuple(mean), tuple(deviation))
    half, labels = _half(len(test[1]), "test images", settings), test[1]
    images = prepared(test[0], image_format)
    calibrate = torch.split(prepared(train[0], image_format), CALIBRATION_BATCH)
    classes, most = classes_of(body, images[:1]), int(labels.max()) + 1
    why = f"the model tells {classes} classes apart"
    require(most <= classes, "data", f"{data} with {most} classes", why, "pass the data it was trained for")
    return Inputs(
        body.eval(), Rows(images[:half], labels[:half]), Rows(images[half:], labels[half:]), "error",
        f"{len(labels) - half} test images of {data}", calibrate if batch_norms(body) else (),
    )  # fmt: skip


def gather(settings: Settings, sources: Sequence[Source]) -> Inputs | None:
    """Open the live model and its rows; None where no data is given."""
    first = sources[0].path
    if not settings.data:
        return None
    data, encoder = settings.data[0], None if settings.entry is not None else encoder_of(first)
    kind = "images" if settings.entry is not None else "language" if encoder else kind_of(first)
    plain = settings.align is None or encoder is None
    why = "units are reordered in language models of one part, and in nets"
    require(plain, "align", f"{settings.align} with {first}", why, "omit --align")
    one = len(settings.data) == 1 or kind == "language"
    require(one, "data", " ".join(settings.data), "images have one task", "pass --data once")
    if settings.entry is not None:
        return _of_images(settings, net_of(settings.entry), None, data)
    do = "pass a text" if kind == "language" else f"pass one of {', '.join(IMAGES)}"
    for name in settings.data:
        require((name in IMAGES) == (kind == "images"), "data", name, f"the models are of the kind {kind}", do)
    if kind == "language":
        return _of_text(settings, first, encoder)
    body, _ = open_folder(first)
    return _of_images(settings, body, image_format_of(first, body.config), data)
