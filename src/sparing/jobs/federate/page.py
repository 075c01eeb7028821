"""The page of federated training, made of its record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sparing.federated.faults import HUGE
from sparing.jobs.federate import figures
from sparing.jobs.federate.figures import is_exact, is_finite, percent, points
from sparing.jobs.federate.methods import LABELS, roles_of
from sparing.report import Page, Record, Section, Table, format_number

LEVEL: Final = 0.05  # below this p-value a lead is called more than chance

PAPER: Final = "Li et al., NeurIPS 2024 (arXiv:2405.12489)"

_ACCURACY: Final = """\
In every round {drawn} of {clients} clients train for {epochs} on rows of their own, and the server makes one model of \
theirs. All methods see the same initial model, the same clients in the same rounds, the same rows in the same order.

Test rows report; nothing is chosen by them.{validation} **Last ten** is the mean over the last ten evaluations, \
which wavers less than the last one."""

_SIGNS: Final = """\
A weight votes by its sign; exact zeros vote for nobody. FedSign pushes every weight along the sign that the global \
model had at the start of the round, and its authors expect models whose signs agree to survive averaging."""

_FORCE: Final = """\
The **force** is the mean push on an element near zero, in units of the gradient. It hardly depends on whether signs \
agree: it pushes all weights outward, so the norm grows. `own-sign` pushes outward without looking at the global \
model, `hinge` pushes only weights that crossed zero, `norm-matched` takes the growth away again."""

_GAP: Final = """\
The **fusion gap** is the accuracy of the mean less the mean accuracy of the models that went into it. Each client's \
model knows its own classes best; above zero the mean knows more than its parts do on average."""

_WEIGHTS: Final = """\
Where a norm layer follows, a growing norm makes every step smaller in proportion, as a falling learning rate would. \
Updates that point the same way add up; at right angles they cancel in part."""

_BYTES: Final = """\
Who trains in which round, and which blocks a client sends, is drawn from the seed before the run, so bytes and steps \
are known to the last one before anything is paid. Counted are the tensors sent to all clients that were drawn, and \
received from those whose update counted."""

_BLOCKS: Final = """\
 Each client trains and sends the body blocks that are drawn for it ({blocks} of them), and whatever is no body \
block: {share} of what whole models would take on the way up."""

_FAULTS: Final = """\
Updates that fail, are not finite, have the wrong shape, claim another weight, or lie more than {huge:g} times as far \
from what was sent as the median does and as more local steps explain (parameters, each buffer, controls) are left \
out, and the round goes on. An update that is turned round has an honest length and is not found so; robust means, \
such as `--robust krum --keep 12`, hold back a part of the harm."""


def answer(record: Record) -> str:
    """What was found, in two sentences of markup."""
    rows = sorted(record.table("methods"), key=lambda row: -row["accuracy"])
    best, n = rows[0], rows[0]["n"]
    start = f"**{best['method']} ends at {_interval(best)}** of {n:,} test rows"
    if len(rows) == 1:
        return f"{start}, after {record.settings['rounds']} rounds. One seed."
    others = ", ".join(f"{row['method']} at {_interval(row)}" for row in rows[1:])
    first, second = best["method"], rows[1]["method"]
    gap = points(best["accuracy"] - rows[1]["accuracy"]).removeprefix("+")
    lead = f"{first} leads {second} by {gap} percentage points, {_verdict(record, first, second)}"
    lead = f"{first} and {second} are level" if gap == "0.0" else lead
    return f"{start}, {others}. {lead}; and it is one seed."


def _verdict(record: Record, first: str, second: str) -> str:
    """Whether equally good models would differ so on the same rows; the paired test, not two intervals beside."""
    (pair,) = [row for row in record.table("pairs") if {row["first"], row["second"]} == {first, second}]
    counts = pair["first_only"], pair["second_only"]
    for_it, against = counts if pair["first"] == first else counts[::-1]
    p = "< 0.001" if pair["p"] < 0.001 else f"= {pair['p']:.3f}"
    counted = f"{for_it:,} rows that only it has right against {against:,} (McNemar, p {p})"
    return f"{'more than chance in these rows explains' if pair['p'] < LEVEL else 'which may be chance'}: {counted}"


def _interval(row: dict[str, Any]) -> str:
    ends = f"{100 * row['accuracy_low']:.1f}, {100 * row['accuracy_high']:.1f}"
    return f"{percent(row['accuracy'])} [{ends}]"


def _accuracy(record: Record) -> Section:
    (data,), settings = record.table("data"), record.settings
    drawn = record.table("methods")[0]["predicted_updates"] // settings["rounds"]
    held = f" {data['validation_rows']:,} training rows are held back to choose by." if data["validation_rows"] else ""
    epochs = "one pass" if settings["local_epochs"] == 1 else f"{settings['local_epochs']} passes"
    text = _ACCURACY.format(drawn=drawn, clients=data["clients"], epochs=epochs, validation=held)
    columns = ["method", "accuracy", "last_ten", "validation_accuracy", "loss"]
    note = "Shares of rows; brackets: 95 % over test rows (Wilson), not over seeds."
    table = Table(_with(record, columns), "The last global model", record.units, columns, note, _roles(record))
    return Section("Accuracy", text, figures.accuracy_figures(record), [table, *_pairs(record)])


def _pairs(record: Record) -> list[Table]:
    """Every two methods on the same test rows."""
    rows = record.table("pairs")
    note = (
        "Rows that only one of the two has right; z: standard errors from no difference; p: McNemar's exact test, each "
        "pair for itself. Over test rows, not over seeds."
    )
    many = len(rows) > figures.FEW
    return [Table(rows, "Two methods on the same rows", note=note, roles=_roles(record), folded=many)] if rows else []


def _signs(record: Record) -> Section | None:
    pictures = figures.sign_figures(record)
    if not pictures:
        return None
    forced = any(is_finite(row["force"]) for row in record.table("methods"))
    columns = ["method", "force", "ssr_global", "ssr_pairs", "norm"]
    note = "ssr: share of weights of equal sign, of a client and the model it received, and of two clients."
    table = Table(_with(record, columns), "Signs in the last round", record.units, columns, note, _roles(record))
    return Section("Do signs agree?", f"{_SIGNS}\n\n{_FORCE}" if forced else _SIGNS, pictures, [table])


def _gap(record: Record) -> Section | None:
    pictures = figures.gap_figures(record)
    return Section("What averaging gains", _GAP, pictures) if pictures else None


def _weights(record: Record) -> Section | None:
    pictures = figures.weight_figures(record)
    return Section("Length and direction", _WEIGHTS, pictures) if pictures else None


def _partition(record: Record) -> Section:
    (data,), settings = record.table("data"), record.settings
    rules = {
        "dirichlet": f"by a Dirichlet draw, α = {settings['alpha']:g}, for "
        + ("each class over clients" if settings["rule"] == "classes" else "each client over classes"),
        "shards": f"by label in {settings['shards']} shards a client",
        "natural": "as the data's own groups have it",
        "iid": "at random",
    }
    text = f"{data['training_rows']:,} rows of {data['classes']} classes are divided {rules[settings['split']]}. "
    text += f"A client holds {data['fewest_rows']:,} to {data['most_rows']:,} rows. The division is in `split.json`."
    whole = Table(record.table("partition"), "Rows of each client", folded=True)
    return Section("Who holds what", text, [figures.partition_figure(record)], [whole])


def _bytes(record: Record) -> Section:
    text = _BYTES
    if record.settings["blocks"] is not None:
        share = next(row["of_full"] for row in record.table("price") if row["direction"] == "up")
        text += _BLOCKS.format(blocks=record.settings["blocks"], share=percent(share))
    if record.settings["engine"] == "flower":
        text += " On Flower every tensor brings a header of its own, which is counted and was not foretold."
    rows = []
    for row in record.table("methods"):
        kinds = (("to clients", "down"), ("to the server", "up"))
        for name, way in kinds:
            rows.append({"method": row["method"], "quantity": f"bytes {name}",
                         "predicted": format_number(row[f"predicted_{way}"], "B"),
                         "counted": format_number(row[f"bytes_{way}"], "B"),
                         "off": row[f"bytes_{way}"] - row[f"predicted_{way}"]})  # fmt: skip
        for name in ("updates", "steps"):
            made = row["answered" if name == "updates" else name]
            off = None if made is None else made - row[f"predicted_{name}"]
            rows.append({"method": row["method"], "quantity": name, "predicted": f"{row[f'predicted_{name}']:,}",
                         "counted": "–" if made is None else f"{made:,}", "off": off})  # fmt: skip
        rows.append({"method": row["method"], "quantity": "training, from the first round",
                     "predicted": format_number(row["predicted_seconds"], "s"),
                     "counted": format_number(row["seconds"], "s"), "off": None})  # fmt: skip
    many = len(record.table("methods")) > figures.FEW
    note = "Off: counted less predicted, in bytes or counts. Training: without evaluation."
    table = Table(rows, "Predicted and counted", note=note, roles=_roles(record), folded=many)
    return Section("The price", text, [figures.bytes_figure(record)], [table])


def _faults(record: Record) -> Section | None:
    rows = record.table("faults")
    if not rows and record.settings["attack"] == "none":
        return None
    note = "Updates: those left out, of all rounds together."
    tables = [Table(rows, "Left out", note=note, roles=_roles(record))] if rows else []
    start = ""
    if record.settings["attack"] != "none":
        chance = f"{record.settings['attacked']:g}"
        start = f"Attack: **{record.settings['attack']}**; each client is hit with a chance of {chance}. "
        start += "" if rows else "No update was left out. "
    return Section("Faults", start + _FAULTS.format(huge=HUGE), tables=tables)


def _roles(record: Record) -> dict[str, Any]:
    return dict(roles_of(record.settings["method"]))


def _with(record: Record, columns: list[str]) -> list[dict[str, Any]]:
    """The methods with these columns, and the intervals that belong to them."""
    ends = [f"{name}_{end}" for name in columns for end in ("low", "high")]
    wanted = [*columns, *ends]
    return [{name: row[name] for name in row if name in wanted} for row in record.table("methods")]


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    settings, names = record.settings, record.settings["method"]
    notes = [
        f"One seed ({record.seed}): another draws other clients, another split and another initial model. Run several "
        "before believing a difference."
    ]
    if len(names) > 1:
        notes.append(
            f"All methods have the same learning rate, {settings['lr']:g}: each may do better at its own, chosen by "
            "validation accuracy, FedAvg too."
        )
    if "fedsign" in names and not {"own-sign", "hinge"} <= set(names):
        notes.append("A gain of FedSign is no proof of alignment: add own-sign and hinge to --method to see.")
    if record.table("faults") and not all(is_exact(row) for row in record.table("methods")):
        notes.append("Clients that were left out are in the prediction, but not in what was counted.")
    if settings["engine"] == "flower":
        notes.append("Flower's replies tell fewer columns: no client pairs, fusion gap or update cosine.")
    return notes


def deeper(record: Record) -> str:
    """The command for a closer look."""
    settings = record.settings
    names = list(dict.fromkeys([*settings["method"], "own-sign", "hinge"]))
    net = f"--net {settings['net']} --alpha {settings['alpha']:g} --rounds {2 * settings['rounds']}"
    return f"sparing federate --method {' '.join(names)} --data {settings['data']} {net} --seed {settings['seed'] + 1}"


def write_page(record: Record, path: Path) -> Path:
    """Write the page."""
    (data,), settings = record.table("data"), record.settings
    made = [_accuracy, _signs, _gap, _weights, _partition, _bytes, _faults]
    facts = {
        "model": f"{settings['net']}, {format_number(data['parameters'])} parameters",
        "engine": ", ".join(dict.fromkeys(row["engine"] for row in record.table("methods"))),
        "go deeper": deeper(record),
        "source": PAPER,
    }
    return Page(
        title=f"Federated: {', '.join(LABELS[name] for name in settings['method'])}",
        question=record.question,
        answer=answer(record),
        sections=[section for section in (make(record) for make in made) if section is not None],
        record=record,
        reproduce=facts,
        caveats=caveats(record),
    ).write(path)
