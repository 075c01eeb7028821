"""The chapter on sharding: one sentence, what fits, what was sent, the paper's statements beside ours."""

from __future__ import annotations

from typing import Any, Final

from sparing.jobs.demo.chapter import Chapter, Claim, run_note
from sparing.jobs.demo.sharding import MEMORY
from sparing.jobs.demo.sharding_ranks import Work
from sparing.report import Figure, Record, Section, Table, format_number, plots
from sparing.report.page import Number

ROLES: Final[dict[str, plots.Role]] = {
    "NNN": "reference", "NNG": "second_rival", "IIG": "ours", "GGG": "rival", "NIG": "extension", "III": "extension",
}  # fmt: skip
COLUMNS: Final = ("plan", "known_as", "held", "predicted_held", "seconds", "predicted_seconds", "loss")
SENT: Final = ("plan", "sent_intra", "predicted_intra", "sent_inter", "predicted_inter")
UNITS: Final = {
    "held": "B", "predicted_held": "B", "sent_intra": "B", "predicted_intra": "B", "sent_inter": "B",
    "predicted_inter": "B", "seconds": "s", "predicted_seconds": "s", "guideline": "s", "loss": "nat/byte",
}  # fmt: skip
NOT_COMPARED: Final = ("NNN", "NNI", "NNG", "INI", "ING", "GIG", "GNG")  # by the paper's main comparison


def rows_of(record: Record) -> list[dict[str, Any]]:
    """The plans that ran here."""
    return record.table("shard_runs")


def case_of(record: Record, name: str) -> dict[str, dict[str, Any]]:
    """Rows of a case by plan."""
    return {str(row["plan"]): row for row in record.table("shards") if row["case"] == name}


def largest_loss_gap(record: Record) -> float:
    """Largest relative difference between the losses of two plans at the same step."""
    by_step: dict[Any, list[float]] = {}
    for row in record.table("shard_losses"):
        by_step.setdefault(row["step"], []).append(float(row["loss"]))
    return max((max(losses) / min(losses) - 1 for losses in by_step.values()), default=0.0)


def exact(record: Record) -> bool:
    """Whether every byte that was sent or held is as predicted."""
    pairs = (("sent_intra", "predicted_intra"), ("sent_inter", "predicted_inter"), ("held", "predicted_held"))
    return all(row[one] == row[other] for row in rows_of(record) for one, other in pairs)


def fit_sentence(record: Record) -> str:
    """What fits on the paper's cluster, in a sentence."""
    full = case_of(record, "65B, full")
    fitting = [row for row in full.values() if row["fits"]]
    best = min(fitting, key=lambda row: row["seconds"])
    return (
        f"Of {len(full)} ways to split a model of 65 billion parameters over 32 GPUs of 80 GB, {len(fitting)} fit; the "
        f"fastest of these, **{best['plan']}**, keeps the links busy for **{format_number(best['seconds'], 's')}** a "
        f"step, ZeRO-3 (GGG) for {format_number(full['GGG']['seconds'], 's')}."
    )


def answer(record: Record) -> str:
    """One sentence: what the processes here sent and held; without them, what fits on the paper's cluster."""
    runs = {str(row["plan"]): row for row in rows_of(record)}
    if not {"IIG", "NNN", "GGG"} <= runs.keys():
        return fit_sentence(record)
    same = "to the byte as predicted" if exact(record) else "NOT as predicted: a bug"
    ratio = runs["GGG"]["seconds"] / runs["IIG"]["seconds"]
    return (
        f"On four processes with a slow link between two pairs, the split **IIG** holds "
        f"**{format_number(runs['IIG']['held'] / runs['NNN']['held'] * 100)} %** of what plain data parallelism does, "
        f"and a step is **{format_number(ratio, '×')}** as fast as ZeRO-3's; bytes sent and held are **{same}**."
    )


def numbers(record: Record) -> tuple[Number, Number, Number]:
    """Speed, bytes, and what fits; the planner's own where no process could be started."""
    full = case_of(record, "65B, full")
    fitting = sum(row["fits"] for row in full.values())
    fits = Number(
        value=f"{fitting} of {len(full)}", note="computed from shapes, nothing run",
        label="ways to split 65 billion parameters that fit 32 GPUs of 80 GB",
    )  # fmt: skip
    runs = {str(row["plan"]): row for row in rows_of(record)}
    if not {"IIG", "NNN", "GGG"} <= runs.keys():
        gain = format_number(full["GGG"]["seconds"] / full["IIG"]["seconds"], "×")
        wire = Number(value=gain, note=fits.note, label="time that links are busy in a step: ZeRO-3 over IIG, 65B")
        held = Number(value=format_number(full["IIG"]["held"], "B"), note=fits.note, label="held by a GPU under IIG")
        return wire, held, fits
    note = run_note(record.seed, "quickest of a few steps")
    ratio = format_number(runs["GGG"]["seconds"] / runs["IIG"]["seconds"], "×")
    share = format_number(100 * runs["IIG"]["held"] / runs["NNN"]["held"])
    return (
        Number(value=ratio, note=note, label="as fast a step under IIG as under ZeRO-3, four processes, slow link"),
        Number(
            value=f"{share} %", note="counted tensor by tensor, as predicted" if exact(record) else "NOT as predicted",
            label="of the bytes that plain data parallelism (DDP) holds in each process: IIG",
        ),
        fits,
    )  # fmt: skip


def claims(record: Record) -> list[Claim]:
    """What the paper states of its cluster, and what was found here."""
    by = {row["statement"]: row for row in statements(record)}
    fits, lead = by["65B, full: what fits 80 GB"], by["7B, full: leaders"]
    found = [
        Claim(
            what="plans that fit 80 GB: 65B, all trained", paper=fits["paper"],
            here=f"{fits['by_formula']} (the paper did not try GIG)",
        ),
        Claim(what="quickest plans: 7B, all trained", paper=lead["paper"], here=f"{lead['by_formula']} (by formula)"),
    ]  # fmt: skip
    for size in ("7B", "65B"):
        row = by[f"{size}, full: IIG over ZeRO-3"]
        seen = f"{row['simulated']} in time on the links (simulated)"
        found.append(Claim(what=f"speed of IIG over ZeRO-3: {size}, all trained", paper=row["paper"], here=seen))
    runs = {str(row["plan"]): row for row in rows_of(record)}
    if {"IIG", "GGG"} <= runs.keys():
        ratio = format_number(runs["GGG"]["seconds"] / runs["IIG"]["seconds"], "×")
        found.append(Claim(what="the same: small net, four processes", paper="–", here=f"{ratio} (measured)"))
    return found


def memory_figure(record: Record) -> Figure:
    """Bytes that a GPU holds under every plan, against its memory."""
    rows = sorted(case_of(record, "65B, full").values(), key=lambda row: float(row["held"]))
    # bars of plans that hold many times the memory would flatten all others
    drawn = [row for row in rows if row["held"] <= 4 * MEMORY]
    left = ", ".join(f"{row['plan']} at {format_number(row['held'], 'B')}" for row in rows if row not in drawn)
    stacks = [plots.Stack(_named(row), {part: row[part] for part in ("params", "grads", "optimizer")}) for row in drawn]
    fitting = ", ".join(str(row["plan"]) for row in rows if row["fits"])
    return plots.stacked_bars(
        stacks, title=f"65 billion parameters on 32 GPUs: {fitting} fit",
        value=plots.Axis("held by a GPU", unit="B"), mark=(MEMORY, f"80 GB ({format_number(MEMORY, 'B')})"),
        caption="Parameters and gradients in 16 bits, optimizer state in 32, as in the paper; activations come on top. "
        f"Off the picture: {left}. The paper reports that only GGG, IGG and IIG ran, and did not try GIG.",
    )  # fmt: skip


def wire_figure(record: Record) -> Figure:
    """Bytes that a process sent on each kind of link, beside the prediction."""
    stacks = [stack for row in rows_of(record) for stack in _sent(row)]
    finding = "Every byte on the wire is where it was predicted" if exact(record) else "Bytes differ from prediction"
    return plots.stacked_bars(
        stacks, title=finding, value=plots.Axis("sent by a process in a step", unit="B"),
        caption="Counted in the ring collectives, payload only. Two groups of two processes on this machine.",
    )  # fmt: skip


def _sent(row: dict[str, Any]) -> tuple[plots.Stack, plots.Stack]:
    """Predicted, and measured."""
    parts = [
        {"inside a group": row[f"{key}_intra"], "between groups": row[f"{key}_inter"]} for key in ("predicted", "sent")
    ]
    return plots.Stack(_named(row), parts[0], kind="predicted"), plots.Stack(_named(row), parts[1], kind="measured")


def speed_figure(record: Record) -> Figure:
    """Bytes held against seconds of a step."""
    rows = rows_of(record)
    ours = next(row for row in rows if row["plan"] == "IIG")
    least = min(rows, key=lambda row: row["held"])
    fastest = min(float(row["seconds"]) for row in rows)
    share = format_number(least["seconds"] / ours["seconds"], "×")
    title = f"{least['plan']} holds least and takes {share} as long as IIG"
    if least is ours:
        title = f"IIG holds least, {format_number(ours['seconds'] / fastest, '×')} the quickest step"
    return plots.scatter(
        [plots.Series(_named(r), [r["held"]], [r["seconds"]], role=ROLES.get(r["plan"], "baseline")) for r in rows],
        title=title, x=plots.Axis("held by a process", unit="B"), y=plots.Axis("step", unit="s", low=0),
        caption="Lower left is better. The network is the paper's, a thousand times slower: 80 Mbit/s between groups, "
        "2000 Mbit/s inside, held back inside the rings. The quickest of three steps.",
    )  # fmt: skip


def statements(record: Record) -> list[dict[str, Any]]:
    """The paper's statements, and what the formulas and the simulation say."""
    big, part, few = (case_of(record, f"65B, {share}") for share in ("full", "1/16", "3/1000"))
    small, small_part = case_of(record, "7B, full"), case_of(record, "7B, 1/16")
    fitting = ", ".join(sorted(plan for plan, row in big.items() if row["fits"]))
    return [
        _row("65B, full: what fits 80 GB", "GGG, IGG, IIG", fitting),
        _row("7B, full: leaders", "NII, IIG, III", ", ".join(_leaders(small)[:3])),
        _row("7B, full: NII over ZeRO-2", "1.67×", *_gain(small, "NII", "NGG")),
        _row("7B, full: IIG over ZeRO-3", "2.28×", *_gain(small, "IIG", "GGG")),
        _row("65B, full: IIG over ZeRO-3", "1.86×", *_gain(big, "IIG", "GGG")),
        _row("65B, 1/16: IIG over ZeRO-3", "2.66×", *_gain(part, "IIG", "GGG")),
        _row("65B, 3/1000: ING over ZeRO-3", "1.44×", *_gain(few, "ING", "GGG")),
        _row("7B, 1/16: NII over ZeRO-2", "1.21×", *_gain(small_part, "NII", "NGG")),
        _row("7B, 1/16: NIG over ZeRO-2", "1.15×", *_gain(small_part, "NIG", "NGG")),
    ]


def _row(what: str, paper: str, formula: str, simulated: str | None = None) -> dict[str, Any]:
    return {"statement": what, "paper": paper, "by_formula": formula, "simulated": simulated}


def _leaders(case: dict[str, dict[str, Any]]) -> list[str]:
    """Plans of the paper's comparison, the least communication by its own formula first."""
    compared = [row for row in case.values() if row["plan"] not in NOT_COMPARED]
    return [str(row["plan"]) for row in sorted(compared, key=lambda row: (round(row["guideline"], 6), row["held"]))]


def _gain(case: dict[str, dict[str, Any]], plan: str, rival: str) -> tuple[str, str]:
    """How much longer the rival's links are busy: by the paper's formula, and simulated."""
    first, second = case[rival], case[plan]
    formula, simulated = (format_number(first[key] / second[key], "×") for key in ("guideline", "seconds"))
    return formula, simulated


def _named(row: dict[str, Any]) -> str:
    return f"{row['plan']} ({row['known_as']})" if row["known_as"] else str(row["plan"])


def details(record: Record) -> Section:
    """All that a first look can do without."""
    text = fit_sentence(record)
    figures, tables = [memory_figure(record)], [_paper(record)]
    if rows := rows_of(record):
        text += (
            "\n\nEvery plan trains the same: losses differ by at most "
            f"{format_number(largest_loss_gap(record))}, relative, which is the rounding of float32 sums in another "
            "order."
        )
        figures.append(wire_figure(record))
        note = "predicted seconds: links alone; processes on this machine also compute, and share its cores. One run."
        ran = Table(rows, "Four processes, two groups", UNITS, COLUMNS, note, ROLES)
        tables = [ran, Table(rows, "Sent by a process in a step", UNITS, SENT, roles=ROLES), *tables]
    else:
        figures = []
    title = "More: what fits and why, bytes on every link, each statement of the paper, every number"
    return Section(title, text, figures, tables)


def chapter(record: Record, work: Work) -> Chapter:
    """The chapter as its page shows it."""
    here = (
        f"Four processes of this machine then train a small net by {len(work.plans)} plans, with links between two "
        "groups held back."
    )
    return Chapter(
        name="shard", topic="Slow networks · PaRO",
        question="How should a model be split over machines when the network between them is slow?",
        answer=answer(record), numbers=numbers(record), claims=claims(record), details=details(record),
        picture=speed_figure(record) if rows_of(record) else memory_figure(record),
        story=(
            "PaRO splits parameters, gradients and optimizer state each on its own: **N** not at all, **I** inside a "
            "group of GPUs, **G** over all of them. What must move often stays inside a group; what moves once a step "
            "goes over all. A plan is three letters, DDP is NNN and ZeRO-3 is GGG; 14 of 27 make sense. All are priced "
            f"for the paper's cluster, 25 times slower between machines than inside. {here if rows_of(record) else ''}"
        ),
        paper="Zhang et al., PaRO, NeurIPS 2024, its measurements on 32 A100 GPUs",
        limits=(
            "Here are two cores and no GPU: the net is small, the network the paper's a thousand times slower. The "
            "paper's ratios contain arithmetic that hides part of the traffic; how long links are busy ranks plans and "
            "bounds the gain, it does not predict it."
        ),
        deeper=(
            "sparing plan --params 65e9 --groups 4 --per-group 8 --inter 80Gbps --intra 2000Gbps --memory 80GB "
            "--accumulate 10",
            "torchrun --nproc-per-node 2 -m sparing probe    # the links you have",
        ),
    )  # fmt: skip


def _paper(record: Record) -> Table:
    note = (
        'paper: measured on A100 GPUs, throughput over the rival\'s (1/16: "266 % that of ZeRO-3" in its abstract). by '
        "formula, simulated: how much longer the rival's links are busy, by the paper's own formula and for what our "
        "engine sends. Arithmetic hides part of that, so these rank plans and bound the gain."
    )
    columns = ("statement", "paper", "by_formula", "simulated")
    return Table(statements(record), "The paper's statements", columns=columns, note=note)
