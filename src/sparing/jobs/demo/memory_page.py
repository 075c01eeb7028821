"""Page of the chapter on memory: bytes of a large model predicted beside those of a small one measured, and losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final, Literal

from sparing.jobs.demo.chapter import Chapter, Row, keyed
from sparing.jobs.demo.finding import Difference, lowest
from sparing.jobs.demo.memory import ARMS, LARGE_TOKENS, RANK, ROLES
from sparing.memory import CATEGORIES
from sparing.report import Figure, Sample, Table, format_number, plots
from sparing.report.page import Number

UNITS: Final = {
    "loss_before": "nat/token", "loss_after": "nat/token", "seconds_per_step": "s", "faster": "×",
    "peak_measured": "B", "peak_predicted": "B", "dev_loss": "nat/token",
}  # fmt: skip
COLUMNS: Final = (
    "method", "lr", "loss_before", "loss_after", "seconds_per_step", "faster", "peak_measured", "peak_predicted",
)  # fmt: skip


class MemoryChapter(Chapter):
    """Losses, bytes, which layers trained, texts, and the paper's figures."""

    name, complete = "memory", ("arms", len(ARMS))
    saves, topic = "fine-tuning memory", "Fine-tuning memory · LISA"
    question = "Can a language model be fine-tuned in less memory, and learn as much?"
    paper = 'Pan et al., "LISA", NeurIPS 2024, arXiv:2403.17919; its LISA trains two layers'
    deeper = ("sparing finetune DIR DATA.jsonl --method lisa", "sparing plan DIR --memory 24GB")
    more = "More: loss over time, bytes by category, which layers trained, texts that the models write, every number"
    limits = (
        "The 7B model is predicted here, not run; on an H100 such predictions were within 1.2 % of the memory that the "
        "card held: docs/results/gpu.md. MT-Bench needs a judge and larger models, so quality here is "
        "held-out loss of the small one. The paper's 2.9× includes a forward pass that freezing made faster, which it "
        "cannot: docs/results/step-time.md."
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

    @cached_property
    def large(self) -> dict[str, Row]:
        """What LLaMA-2-7B would hold, by method."""
        return keyed(self.record.table("large"), "method")

    def held_by_large(self, method: str) -> str:
        """The same in words."""
        return format_number(self.large[method]["peak"], "B")

    @cached_property
    def ends(self) -> dict[str, list[float]]:
        """Loss at the end by method, in the order of seeds (nat/token)."""
        ends: dict[str, list[float]] = {}
        # the demo's own seed is the first
        for row in (*self.record.table("arms"), *self.record.table("again")):
            ends.setdefault(row["method"], []).append(row["loss_after"])
        return ends

    def loss_gap(self, one: str, other: str) -> Difference:
        """Loss of one method less that of another at the end, paired by the seed of rows and draws (nat/token)."""
        return Difference.of([a - b for a, b in zip(self.ends[one], self.ends[other], strict=True)], "nat")

    @property
    def within(self) -> str:
        """How far predictions and measurements of the small model are apart at most, in words."""
        return f"{max(self.memory_error, 0.01):.2g} %"

    @property
    def saved_by_large(self) -> Difference:
        """Bytes saved by LISA for the large model; the interval is that of predictions as far off as here."""
        share, off = self.large["LISA"]["peak"] / self.large["full"]["peak"], self.memory_error / 100
        low, high = sorted(100 * (share * (1 + sign * off) / (1 - sign * off) - 1) for sign in (-1, 1))
        return Difference(mean=100 * (share - 1), low=low, high=high, n=len(self.rows), unit="%")

    def answer(self) -> str:
        """Bytes of the large model and of the small one, and losses."""
        full, lisa, frozen, lora = self.arms
        return (
            f"For a model of seven billion parameters LISA is predicted to hold **{self.held_by_large('LISA')}** at "
            f"the peak of a step, full fine-tuning {self.held_by_large('full')} and LoRA {self.held_by_large('LoRA')}. "
            f"The small model here held {lisa['held']}, {full['held']} and {lora['held']} ({frozen['held']} under LISA "
            f"with the embedding frozen), within {self.within} of the prediction. Held-out loss, LISA less full "
            f"fine-tuning: **{self.loss_gap('LISA', 'full').whole}**."
        )

    def story(self) -> str:
        """Four ways from the same weights on the same rows."""
        name = self.record.table("materials")[0]["name"]
        steps = max(row["step"] for row in self.record.table("curve"))
        tuned = "each at the best of three learning rates" if self.scale == "small" else "at rates that are not tuned"
        seeds = f", with {self.seeds} seeds of rows and draws" if self.seeds > 1 else ""
        return (
            f"The model and the text: {name}. Four ways to fine-tune start from the same weights and see the same rows "
            f"for {steps} steps, {tuned}{seeds}. LISA trains the embedding, the head and two layers, drawn anew every "
            "five steps: what is frozen needs no gradient and no optimizer state. With the embedding frozen as well, "
            "the backward pass stops at the lowest drawn layer. LoRA, the usual rival, trains small added matrices. "
            f"The large model is LLaMA-2-7B on a row of {LARGE_TOKENS:,} tokens in bfloat16, from its shapes alone."
        )

    def pays(self) -> str:
        """Large models."""
        return (
            "In a large model gradients and optimizer state are most of the peak; LISA holds few of either, and every "
            f"weight can still change. Held-out loss here, LISA less LoRA of rank {RANK}: "
            f"{self.loss_gap('LISA', 'LoRA').whole}."
        )

    def fails(self) -> str:
        """Small models, and where LoRA does."""
        full, _, frozen, _ = self.arms
        little = 100 * (1 - frozen["peak_measured"] / full["peak_measured"])
        return (
            "In a model as small as the one here most of the peak is logits, which no method saves: even with the "
            f"embedding frozen only {little:.0f} % goes. LoRA needs no more memory than LISA, and on SmolLM2-135M it "
            "learned more (docs/results/layers.md): try it first."
        )

    def card(self) -> Number:
        """Bytes of the large model, beside those of the small one."""
        full, _, frozen, _ = self.arms
        here = 100 * (1 - frozen["peak_measured"] / full["peak_measured"])
        return Number(
            value=self.saved_by_large.headline,
            label=f"memory of a step, LISA against full fine-tuning: LLaMA-2-7B, predicted; −{here:.0f} % measured on "
            "the small model here, embedding frozen",
            interval=f"predictions were within {self.within} of what {len(self.rows)} methods held here",
            control=f"LoRA of rank {RANK}, 7B: {self.held_by_large('LoRA')}; LISA {self.held_by_large('LISA')}",
        )  # fmt: skip

    def brief(self) -> str:
        """The finding in a line."""
        full, _, frozen, _ = self.arms
        here = 100 * (1 - frozen["peak_measured"] / full["peak_measured"])
        return f"LISA {self.saved_by_large.headline}; small model, measured: −{here:.0f} %"

    def numbers(self) -> list[Number]:
        """Loss against full fine-tuning, and how well bytes were predicted."""
        more, rival, full = self.loss_gap("LISA", "full"), self.loss_gap("LoRA", "full"), self.arms[0]
        gap = "largest gap between bytes predicted from shapes alone and bytes measured"
        return [
            Number(
                value=more.headline,
                label="held-out loss of LISA less full fine-tuning's, which goes from "
                f"{full['loss_before']:.2f} to {full['loss']} nat/token",
                interval=more.beside(), control=f"LoRA less full: {rival.text} {rival.interval}",
            ),
            Number(value=self.within, label=gap, note=f"{len(self.rows)} methods, one step each"),
        ]  # fmt: skip

    def licences(self) -> list[tuple[str, str]]:
        """Model and text."""
        (materials,) = self.record.table("materials")
        return [(materials["name"], materials["licence"])]

    def claims(self) -> list[tuple[str, str, str]]:
        """Memory, quality and speed."""
        full, lisa, frozen, lora = self.arms
        faster, still = (format_number(row["faster"], "×") for row in (lisa, frozen))
        bench = "5.18 · 4.86 · 5.42 points of MT-Bench, more is better (LLaMA-2-7B, arXiv v1)"
        held, losses = (" · ".join(row[column] for row in (full, lora, lisa)) for column in ("held", "loss"))
        speeds = f"{faster} as fast under LISA, {still} with the embedding frozen (one run)"
        large = " · ".join(self.held_by_large(method) for method in ("full", "LoRA", "LISA"))
        return [
            ("peak memory: full · LoRA · LISA", "59 · 23 · 23 G (LLaMA-2-7B, Table 1)", f"{large} (predicted)"),
            ("the same of the small model here", "–", held),
            ("quality: full · LoRA · LISA", bench, f"{losses} nat/token held out, less is better"),
            ("a step against full fine-tuning's", "2.9× as fast (Figure 4)", speeds),
        ]

    def figures(self) -> list[Figure]:
        """Bytes beside those of the large model; loss over bytes and over time, bytes by category, layers over time."""
        least = min(self.rows, key=lambda row: row["peak_measured"])["method"]
        best = lowest(self.ends)
        finding = f"{'full fine-tuning' if best == 'full' else best} ends lowest" if best else "no loss is shown lowest"
        points = [(row["method"], [row["peak_measured"]], [row["loss_after"]]) for row in self.rows]
        once = f"One run each is drawn; the finding is that of {self.seeds} seed{'s' if self.seeds > 1 else ''}."
        at_end = plots.scatter(
            [plots.Series(method, peak, loss, role=ROLES[method]) for method, peak, loss in points],
            title=f"{least} holds least, {finding}", x=plots.Axis("measured peak of a step", unit="B"),
            y=plots.Axis("held-out loss at the end", unit="nat/token"), caption=f"Lower left is better. {once}",
        )  # fmt: skip
        over_time = plots.lines(
            plots.series(self.record.table("curve"), x="seconds", y="loss", by="method", roles=ROLES),
            title=f"In the same number of steps, {finding}", x=plots.Axis("training time", unit="s"),
            y=plots.Axis("held-out loss", unit="nat/token"),
            caption=f"Test rows, seen neither in training nor when choosing the rate. {once}",
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
        return [self.shares_figure(), at_end, over_time, held, self.layers_figure()]

    def shares_figure(self) -> Figure:
        """Share of full fine-tuning's bytes by method: of the large model predicted, of the small one measured."""
        here = {row["method"]: row for row in self.record.table("memory") if row["kind"] == "measured"}

        def stack(arm: str, by: Mapping[str, Row], kind: Literal["predicted", "measured"]) -> plots.Stack:
            whole = sum(by["full"][part] for part in CATEGORIES)
            return plots.Stack(arm, {part: 100 * by[arm][part] / whole for part in CATEGORIES}, kind)

        stacks = [each for arm in ARMS for each in (stack(arm, self.large, "predicted"), stack(arm, here, "measured"))]
        large, small = (stack("LISA", by, "measured").total for by in (self.large, here))
        return plots.stacked_bars(
            stacks, value=plots.Axis("share of what full fine-tuning holds at its peak", unit="%"),
            title=f"LISA holds {large:.0f} % of full fine-tuning's bytes at 7B, {small:.0f} % in the small model here",
            caption="Predicted: LLaMA-2-7B in bfloat16, from its shapes. Measured: the small model in float32; logits "
            "and activations are most of what it holds.",
        )  # fmt: skip

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
        columns = ("method", "peak", *CATEGORIES)
        large = Table(
            list(self.large.values()), "LLaMA-2-7B, predicted", dict.fromkeys(columns[1:], "B"), columns, roles=ROLES
        )
        tables = [Table(self.rows, "The four methods", UNITS, COLUMNS, roles=ROLES), large]
        if tried := self.record.table("sweep"):
            tables.append(Table(tried, "Learning rates tried, on the development rows", UNITS, roles=ROLES))
        return tables

    def samples(self) -> list[Sample]:
        """Continuations of the same openings, before and after."""
        texts: dict[str, dict[str, str]] = {}
        for row in self.record.table("samples"):
            texts.setdefault(row["prompt"], {})[row["when"]] = row["text"]
        return [Sample(prompt=prompt, texts=by_when) for prompt, by_when in texts.items()]
