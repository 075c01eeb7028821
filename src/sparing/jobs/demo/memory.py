"""Chapter on memory: fine-tune a real language model four ways, full, LISA, LISA with a frozen embedding, LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from sparing.blocks import tied
from sparing.jobs.demo.chapter import Chapter, Row, begin_on, keyed, load_or_omit
from sparing.jobs.demo.inputs import Inputs, gather
from sparing.jobs.demo.settings import Settings
from sparing.jobs.finetune.loop import fit
from sparing.jobs.finetune.settings import Training
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.step import Method
from sparing.jobs.lm.texts import continuations
from sparing.jobs.run import Run
from sparing.jobs.step import DivergedError
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full
from sparing.memory import CATEGORIES
from sparing.report import Figure, Progress, Record, Sample, Table, format_number, plots

if TYPE_CHECKING:
    from torch import nn

FROZEN: Final = "LISA, embedding frozen"
ROLES: Final[dict[str, plots.Role]] = {"full": "reference", "LISA": "ours", FROZEN: "extension", "LoRA": "rival"}
ARMS: Final = tuple(ROLES)  # in the order of every table and picture
UNITS: Final = {
    "loss_before": "nat/token", "loss_after": "nat/token", "seconds_per_step": "s", "faster": "×",
    "peak_measured": "B", "peak_predicted": "B", "dev_loss": "nat/token",
}  # fmt: skip
COLUMNS: Final = (
    "method", "lr", "loss_before", "loss_after", "seconds_per_step", "faster", "peak_measured", "peak_predicted",
)  # fmt: skip


def method_of(arm: str, model: nn.Module) -> Method:
    """What trains in an arm; a head that shares the embedding's weights is frozen with it."""
    if arm == "full":
        return Full()
    if arm == "LoRA":
        return Lora(rank=8, alpha=16.0)
    if arm == "LISA":
        return LayerSampling(active=2, period=5)
    # a tied head is the embedding: it cannot train while that is frozen
    return LayerSampling(active=2, period=5, embed=False, head=not tied(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One contender on its materials."""

    name: str  # one of ``ARMS``
    inputs: Inputs
    seed: int  # of order, draws and dropout

    def training(self, model: nn.Module, lr: float, *, trial: bool) -> Training:
        """The settings of a run: short for a trial of a learning rate, whole otherwise."""
        steps = self.inputs.trial if trial else self.inputs.steps
        every = 0 if trial else max(2, steps // 8)
        return Training(
            method=method_of(self.name, model), lr=lr, steps=steps, batch=self.inputs.batch, accumulate=1,
            seed=self.seed, warmup=min(2, steps - 1), schedule="constant" if trial else "cosine", evaluate_every=every,
        )  # fmt: skip


def try_rate(arm: Arm, lr: float, record: Record, bar: Progress) -> float:
    """Train a fresh model for a few steps; its development loss (nat/token), infinite if it diverged."""
    model, _ = arm.inputs.load()
    try:
        fit(model, arm.inputs.train, arm.training(model, lr, trial=True), label="")
        loss = held_out_loss(model, arm.inputs.dev, batch=4)[0]
    except DivergedError:
        loss = float("inf")
    record.add("sweep", method=arm.name, lr=lr, dev_loss=loss)
    bar.advance(method=arm.name, dev_loss=loss)
    return loss


def full_run(arm: Arm, lr: float, record: Record, bar: Progress) -> None:
    """Train an arm at its rate and write its curve, bytes, speed and samples."""
    made = arm.inputs
    model, tokenizer = made.load()
    training = arm.training(model, lr, trial=False)
    texts = {}
    if arm.name == "full":
        texts["before"] = continuations(model, tokenizer, made.prompts, max_new_tokens=48)
    run = fit(model, made.train, training, held_out=made.test, label=arm.name, memory=True)
    texts[f"after {arm.name}"] = continuations(model, tokenizer, made.prompts, max_new_tokens=48)
    curve: list[Row] = run.table("held_out")
    for row in curve:
        record.add("curve", method=arm.name, **{key: row[key] for key in ("step", "loss", "perplexity", "seconds")})
    for row in run.table("switches"):
        record.add("switches", method=arm.name, **row)
    held = keyed(run.table("memory"), "category")
    for kind in ("predicted", "measured"):
        record.add("memory", method=arm.name, kind=kind, **{part: held[part][kind] for part in CATEGORIES})
    for when, written in texts.items():
        for prompt, text in zip(made.prompts, written, strict=True):
            record.add("samples", prompt=prompt, when=when, text=text)
    first, last, peak = curve[0], curve[-1], held["total"]
    record.add(
        "arms", method=arm.name, lr=lr, loss_before=first["loss"], loss_after=last["loss"],
        perplexity_after=last["perplexity"], seconds_per_step=last["seconds"] / last["step"],
        peak_predicted=peak["predicted"], peak_measured=peak["measured"],
    )  # fmt: skip
    bar.advance(method=arm.name, lr=f"{lr:g}")


def run_chapter(run: Run) -> None:
    """For each arm, take the rate of least development loss and train with it; test rows choose nothing."""
    settings: Settings = run.settings
    if len(run.record.table("arms")) == len(ARMS):
        return

    def read() -> Inputs:
        return gather(settings.source, settings.out, settings.scale)

    # a model that was asked for by name must be there
    inputs = load_or_omit(read) if settings.source == "auto" else read()
    begin_on(run, "materials", inputs.title, licence=inputs.licence)
    # a single rate is taken untried
    tried = {name: rates if len(rates := inputs.rates[name]) > 1 else () for name in ARMS}
    total, done = sum(map(len, tried.values())) + len(ARMS), len(run.results("memory: "))
    with Progress("fine-tune", total=total, unit="run", resume_at=done) as bar:
        for name in ARMS:
            arm = Arm(name=name, inputs=inputs, seed=settings.seed)
            losses = {
                lr: run.once(f"memory: {name} at {lr:g}", partial(try_rate, arm, lr, run.record, bar))
                for lr in tried[name]
            }
            lr = min(losses, key=losses.__getitem__) if losses else inputs.rates[name][0]
            run.once(f"memory: {name}", partial(full_run, arm, lr, run.record, bar))


class MemoryChapter(Chapter):
    """Losses, bytes, which layers trained, texts, and the paper's figures."""

    name, complete = "memory", ("arms", len(ARMS))
    saves, topic = "fine-tuning memory", "Fine-tuning memory · LISA"
    question = "Can a language model be fine-tuned in less memory, and learn as much?"
    paper = 'Pan et al., "LISA", NeurIPS 2024, arXiv:2403.17919; its LISA trains two layers'
    deeper = ("sparing finetune DIR DATA.jsonl --method lisa", "sparing plan DIR --memory 24GB")
    more = "More: loss over time, bytes by category, which layers trained, texts that the models write, every number"
    limits = (
        "The ratio 59 to 23 is out of reach here: in so small a model most of the peak is logits, which no method "
        "saves; `sparing plan` and docs/results/memory.md have the paper's own models, from shapes. MT-Bench needs "
        "a judge and larger models, so quality here is held-out loss. The paper's 2.9× includes a forward pass "
        "that freezing made faster, which it cannot: docs/results/step-time.md."
    )
    details = (
        "Each learning rate is the best of three, tried for a few steps and judged on development rows; a demo of "
        "scale tiny takes the middle one untried. Where head and embedding share their weights, a frozen embedding "
        "freezes the head with it."
    )

    @cached_property
    def rows(self) -> list[Row]:
        """The methods, with bytes and loss in words, and how many times faster than full fine-tuning a step was."""
        rows = self.record.table("arms")
        full = keyed(rows, "method")["full"]["seconds_per_step"]
        return [
            row | {
                "faster": full / row["seconds_per_step"], "loss": format_number(row["loss_after"]),
                "held": format_number(row["peak_measured"], "B"),
            }
            for row in rows
        ]  # fmt: skip

    @property
    def arms(self) -> list[Row]:
        """The same in the order of ``ARMS``."""
        by = keyed(self.rows, "method")
        return [by[name] for name in ARMS]

    @cached_property
    def memory_error(self) -> float:
        """Largest difference between a predicted and a measured peak (%)."""
        return 100 * max(abs(float(row["peak_predicted"] / row["peak_measured"]) - 1) for row in self.rows)

    def answer(self) -> str:
        """Losses and bytes."""
        full, lisa, frozen, lora = self.arms
        return (
            f"LISA ends at a held-out loss of **{lisa['loss']}** nat/token, full fine-tuning at {full['loss']}; at its "
            f"peak a step holds **{lisa['held']}** instead of {full['held']}. With the embedding frozen as well it is "
            f"**{frozen['held']}** and {frozen['loss']}; LoRA, {lora['held']} and {lora['loss']}."
        )

    def story(self) -> str:
        """Four ways from the same weights on the same rows."""
        name = self.record.table("materials")[0]["name"]
        steps = max(row["step"] for row in self.record.table("curve"))
        tuned = "each at the best of three learning rates" if self.scale == "small" else "at rates that are not tuned"
        return (
            f"The model and the text: {name}. Four ways to fine-tune start from the same weights and see the same rows "
            f"for {steps} steps, {tuned}. LISA trains the embedding, the head and two layers, drawn anew every five "
            "steps: what is frozen needs no gradient and no optimizer state. With the embedding frozen as well, the "
            "backward pass stops at the lowest drawn layer. LoRA, the usual rival, trains small added matrices."
        )

    def numbers(self) -> list[tuple[str, str, str]]:
        """Bytes, loss, and how well the bytes were predicted."""
        full, lisa, frozen, _ = self.arms
        saved = 100 * (1 - frozen["peak_measured"] / full["peak_measured"])
        memory = "memory at the peak of a step: LISA with a frozen embedding against full fine-tuning"
        loss = f"after full fine-tuning {full['loss_after']:.2f}, before {full['loss_before']:.2f}"
        gap = "largest gap between bytes predicted from shapes alone and bytes measured"
        return [
            (f"−{saved:.0f} %", memory, self.runs()),
            (f"{lisa['loss_after']:.2f} nat", f"held-out loss per token after LISA; {loss}", self.runs()),
            (f"{max(self.memory_error, 0.01):.2g} %", gap, "4 methods, one step each"),
        ]

    def claims(self) -> list[tuple[str, str, str]]:
        """Memory, quality and speed."""
        full, lisa, frozen, lora = self.arms
        faster, still = (format_number(row["faster"], "×") for row in (lisa, frozen))
        bench = "5.18 · 4.86 · 5.42 points of MT-Bench, more is better (LLaMA-2-7B, arXiv v1)"
        held, losses = (" · ".join(row[column] for row in (full, lora, lisa)) for column in ("held", "loss"))
        speeds = f"{faster} as fast under LISA, {still} with the embedding frozen"
        return [
            ("peak memory: full · LoRA · LISA", "59 · 23 · 23 G (LLaMA-2-7B, Table 1)", held),
            ("quality: full · LoRA · LISA", bench, f"{losses} nat/token held out, less is better"),
            ("a step against full fine-tuning's", "2.9× as fast (Figure 4)", speeds),
        ]

    def figures(self) -> list[Figure]:
        """Loss over bytes; loss over time, bytes by category, layers over time."""
        ends = [min(self.rows, key=lambda row: row[column])["method"] for column in ("loss_after", "peak_measured")]
        best, least = ("full fine-tuning" if name == "full" else name for name in ends)
        points = [(row["method"], [row["peak_measured"]], [row["loss_after"]]) for row in self.rows]
        at_end = plots.scatter(
            [plots.Series(method, peak, loss, role=ROLES[method]) for method, peak, loss in points],
            title=f"{least} holds least, {best} ends lowest", x=plots.Axis("measured peak of a step", unit="B"),
            y=plots.Axis("held-out loss at the end", unit="nat/token"),
            caption="Lower left is better. One run each (n = 1, one seed).",
        )  # fmt: skip
        over_time = plots.lines(
            plots.series(self.record.table("curve"), x="seconds", y="loss", by="method", roles=ROLES),
            title=f"In the same number of steps, {best} ends lowest", x=plots.Axis("training time", unit="s"),
            y=plots.Axis("held-out loss", unit="nat/token"),
            caption="Test rows, seen neither in training nor when choosing the rate. One run each (n = 1, one seed).",
        )  # fmt: skip
        held = plots.stacked_bars(
            [
                plots.Stack(row["method"], {part: row[part] for part in CATEGORIES}, kind=row["kind"])
                for row in self.record.table("memory")
            ],
            title=f"Prediction and measurement agree within {max(self.memory_error, 0.1):.1f} %",
            value=plots.Axis("held at the peak of a step", unit="B"),
            caption="Predicted from shapes alone, with nothing allocated; measured by counting live tensors. Float32.",
        )  # fmt: skip
        return [at_end, over_time, held, self.layers_figure()]

    def layers_figure(self) -> Figure:
        """Which layer trained when, in the LISA run."""
        switches = [row for row in self.record.table("switches") if row["method"] == "LISA"]
        drawn = [{int(block) for block in str(row["blocks"]).split()} for row in switches]
        layers = 1 + max((block for blocks in drawn for block in blocks), default=0)
        edges = [row["step"] for row in switches]
        # the last draw gets a cell as wide as the one before
        edges.append(2 * edges[-1] - edges[-2] if len(edges) > 1 else edges[-1] + 1)
        return plots.heatmap(
            [[float(layer in blocks) for blocks in drawn] for layer in range(layers)],
            title="Two layers train at a time; a new pair is drawn every five steps",
            x=plots.Axis("step"), y=plots.Axis("layer"), x_edges=edges, kind="switch",
            caption="The run called LISA; embedding, final norm and head train throughout.",
        )  # fmt: skip

    def tables(self) -> list[Table]:
        """The methods, and the rates that were tried."""
        tables = [Table(self.rows, "The four methods", UNITS, COLUMNS, roles=ROLES)]
        if tried := self.record.table("sweep"):
            tables.append(Table(tried, "Learning rates tried, on the development rows", UNITS, roles=ROLES))
        return tables

    def samples(self) -> list[Sample]:
        """Continuations of the same openings, before and after."""
        texts: dict[str, dict[str, str]] = {}
        for row in self.record.table("samples"):
            texts.setdefault(row["prompt"], {})[row["when"]] = row["text"]
        return [Sample(prompt=prompt, texts=by_when) for prompt, by_when in texts.items()]
