"""The page of federated training, made of its record alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sparing.federated.server.faults import HUGE
from sparing.jobs import hub
from sparing.jobs.federate.figures import (
    ACCURACY,
    COSINE,
    FEW,
    GAP,
    KEPT,
    LOSS,
    NORM,
    SHARED,
    bytes_figure,
    is_exact,
    optimizer_text,
    partition_figure,
    percent,
    points,
    roles,
    secure_text,
)  # fmt: skip
from sparing.jobs.federate.methods import LABELS
from sparing.jobs.federate.settings import RATES
from sparing.report import Figure, Record, format_number
from sparing.report.cells import is_finite
from sparing.report.declared import Chapter, Rows, RunPage, applicable

LEVEL: Final = 0.05  # below this p-value a lead is called more than chance

PAPER: Final = "Li et al., NeurIPS 2024 (arXiv:2405.12489)"

_ACCURACY: Final = """\
In every round {drawn} of {clients} clients train for {epochs} on rows of their own by {steps}, and the server makes \
one model of theirs. All methods see the same initial model, the same clients in the same rounds, the same rows in the \
same order.

Test rows report; nothing is chosen by them.{validation} **Last ten** is the mean over the last ten evaluations, \
which wavers less than the last one."""

_ACCURACY_OF_TEXT: Final = """\
In every round {drawn} of {clients} clients train for {epochs} on texts of their own by {steps}, and the server makes \
one model of theirs. All methods see the same model at the start, the same clients in the same rounds, the same rows \
in the same order.

The last rows of each client's texts are test rows; nothing is chosen by them.{validation} Accuracy is the share of \
tokens that are predicted right."""

_ONE_ROW: Final = "Tokens of one text depend on each other: no interval and no test is given. Run several seeds."

_FACTORS: Final = """\
FedAvg averages the factors A and B of LoRA, which is not the mean of the clients' models; fedex-lora, flora and \
ffa-lora are in --methods."""

_SIGNS: Final = """\
A weight votes by its sign; exact zeros vote for nobody. FedSign pushes every weight along the sign that the global \
model had at the start of the round, and its authors expect models whose signs agree to survive averaging."""

_FORCE: Final = """\
The **force** is the mean push on an element near zero, in units of the gradient. It hardly depends on whether signs \
agree: it pushes all weights outward, so the norm grows. `own-sign` pushes outward without looking at the global \
model, `hinge` pushes only weights that crossed zero, `norm-matched` takes the growth away again."""

_GAP: Final = """\
The **fusion gap** is the accuracy of the mean less the mean accuracy of the models that went into it. Each client's \
model knows its own data best; above zero the mean knows more than its parts do on average."""

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

_SPARE: Final = """\
 Rounds ask {spare} more clients than they need: who answers first is not known before, so steps, and bytes of drawn \
blocks, are predicted by their means."""

_WAITED: Final = """\
 Rounds waited {waited} in all, by the delays that were drawn; a client that was late once is not waited for until it \
answers in time again."""

_LOCAL: Final = "The global model is measured with the mean of the statistics, which no client uses: each has its own."
_SEEN: Final = "The simulation sees each update, and measures clients by them; the server of a deployment would not."

_FAULTS: Final = """\
Updates that fail, are not finite, have the wrong shape, claim another weight, or lie more than {huge:g} times as far \
from what was sent as the median does and as more local steps explain (parameters, each buffer, controls) are left \
out, and the round goes on. An update that is turned round, or made to hide among honest ones, has an honest length \
and is not found so; robust means, such as `--robust krum` or `--robust centered --bucket 2`, hold back a part of the \
harm."""

_PRIVACY: Final = """\
Whoever sees every global model of the run learns little about any one client: with probability 1 − δ the models are \
at most e^ε times likelier with that client than {other}. Each update is shortened to a norm, and noise of {noise:g} \
norms is added {place}. Clients are drawn {drawn}, and ε counts on nobody knowing who was drawn."""

_PRIVATE_TABLE: Final = """\
ε before: all rounds with their whole noise; after: the rounds made, with the noise of those that answered. δ: the \
probability that ε fails."""

_UNCOUNTED: Final = """\
ε covers the models, not this page: losses, signs and accuracies of clients are measured by the simulation and have no \
noise; nor does ε count the choice of settings by several runs."""

_SEEDED_NOISE: Final = "The noise comes from the seed of the run: who knows it can take it off. It is a simulation."

_SHARES: Final = "Shares of rows; brackets: 95 % over test rows (Wilson), not over seeds. Seconds: of training."

_PAIRS: Final = """\
Rows that only one of the two has right; z: standard errors from no difference; p: McNemar's exact test, each pair for \
itself. Over test rows, not over seeds."""

_SSR: Final = "ssr: share of weights of equal sign, of a client and the model it received, and of two clients."

_OFF: Final = "Off: counted less predicted, in bytes or counts. Training: without evaluation."

_ONE_SEED: Final = """\
another draws other clients, another split and another initial model. Run several before believing a difference."""

_ONE_RATE: Final = "each may do better at its own, chosen by validation accuracy, FedAvg too."

_NOT_COUNTED: Final = "Clients that were left out are in the prediction, but not in what was counted."

_FLOWER: Final = "Flower's replies tell fewer columns: no client pairs, fusion gap or update cosine."

_LEFT_OUT: Final = "Updates: those left out, of all rounds together."


def answer(record: Record) -> str:
    """What was found, in two sentences of markup."""
    if of_text(record):
        return _text_answer(record)
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


def of_text(record: Record) -> bool:
    """Whether clients trained a language model."""
    return record.settings.get("model") is not None


def _text_answer(record: Record) -> str:
    """What was found about a language model, by loss."""
    rows = sorted(record.table("methods"), key=lambda row: row["loss"])
    texts = [f"{row['method']} at {row['perplexity']:.4g} ({row['loss']:.4f} nats)" for row in rows]
    start = f"**{texts[0].replace(' at ', ' ends at perplexity ', 1)}** on {rows[0]['n']:,} test tokens"
    others = f", {', '.join(texts[1:])}" if len(rows) > 1 else ""
    return f"{start}{others}, after {record.settings['rounds']} rounds. One seed."


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


def accuracy_text(record: Record) -> str:
    """Who trains, and what test rows and validation rows are for."""
    (data,), settings = record.table("data"), record.settings
    drawn = record.table("methods")[0]["predicted_updates"] // settings["rounds"]
    held = f" {data['validation_rows']:,} training rows are held back to choose by." if data["validation_rows"] else ""
    reported = _ACCURACY_OF_TEXT if of_text(record) else _ACCURACY
    epochs = "one pass" if settings["local_epochs"] == 1 else f"{settings['local_epochs']} passes"
    steps = optimizer_text(record)
    return reported.format(drawn=drawn, clients=data["clients"], epochs=epochs, validation=held, steps=steps)


def partition_text(record: Record) -> str:
    """How rows were divided."""
    (data,), settings = record.table("data"), record.settings
    rules = {
        "dirichlet": f"by a Dirichlet draw, α = {settings['dirichlet']['alpha']:g}, for "
        + ("each class over clients" if settings["dirichlet"]["rule"] == "classes" else "each client over classes"),
        "shards": f"by label in {settings['shards']['per_client']} shards a client",
        "natural": "as the data's own groups have it",
        "iid": "at random",
    }
    what = "rows of text" if of_text(record) else f"rows of {data['classes']} classes"
    text = f"{data['training_rows']:,} {what} are divided {rules[settings['split']]}. "
    return text + (
        f"A client holds {data['fewest_rows']:,} to {data['most_rows']:,} rows. The division is in `split.json`."
    )


def price_text(record: Record) -> str:
    """What is known before anything is paid."""
    text = _BYTES
    if record.settings["blocks"] is not None:
        share = next(row["of_full"] for row in record.table("price") if row["direction"] == "up")
        text += _BLOCKS.format(blocks=record.settings["blocks"], share=percent(share))
    settings = record.settings
    if settings.get("aggregation") == "secure":
        text += f" {secure_text(record)}"
    if settings.get("spare"):
        text += _SPARE.format(spare=percent(settings["spare"]))
    if waits := [row["waited"] for row in record.table("rounds") if "waited" in row]:
        text += _WAITED.format(waited=format_number(sum(waits), "s"))
    if settings["engine"] == "flower":
        text += " On Flower every tensor brings a header of its own, which is counted and was not predicted."
    return text


def price_rows(record: Record) -> Iterator[dict[str, Any]]:
    """What was predicted beside what was counted, five rows a method."""
    for row in record.table("methods"):
        for name, kind, made in (
            ("bytes to clients", "down", row["bytes_down"]), ("bytes to the server", "up", row["bytes_up"]),
            ("updates", "updates", row["answered"]), ("steps", "steps", row["steps"]),
        ):  # fmt: skip
            known = row[f"predicted_{kind}"]
            texts = [
                "–" if x is None else format_number(x, "B") if kind in {"down", "up"} else f"{x:,}"
                for x in (known, made)
            ]
            off = None if made is None else made - known
            yield {"method": row["method"], "quantity": name, "predicted": texts[0], "counted": texts[1], "off": off}
        known, made = (format_number(row[name], "s") for name in ("predicted_seconds", "seconds"))
        yield {"method": row["method"], "quantity": "training, from the first round", "predicted": known,
               "counted": made, "off": None}  # fmt: skip


def faults_text(record: Record) -> str:
    """What was left out of the means, and the attack if there was one; nothing where neither is."""
    rows, attack = record.table("faults"), record.settings["attack"]
    if not rows and attack == "none":
        return ""
    start = ""
    if attack != "none":
        start = f"Attack: **{attack}**; each client is hit with a chance of {record.settings['attacked']:g}. "
        start += "" if rows else "No update was left out. "
    return start + _FAULTS.format(huge=HUGE)


def privacy_text(record: Record) -> str:
    """What ε says here, if the run is private."""
    settings = record.settings
    if settings["privacy"] == "none":
        return ""
    poisson = settings["sampling"] == "poisson"
    other, drawn = "without it", "each by a coin of its own (Poisson)"
    if not poisson:
        other, drawn = "with another in its place", "as many in each round, without replacement"
    place = "to the sum by the server"
    if settings["privacy"] == "clients":
        place = "to the sum by the clients, each its share; the server of this simulation sees each update"
    return _PRIVACY.format(other=other, noise=settings["private"]["noise"], place=place, drawn=drawn)


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    settings, names = record.settings, record.settings["methods"]
    exact = all(is_exact(row) for row in record.table("methods"))
    unproven = "fedsign" in names and not {"own-sign", "hinge"} <= set(names)
    return applicable(
        (True, f"One seed ({record.seed}): {_ONE_SEED}"),
        (len(names) > 1, f"All methods have the same optimizer and rate, {optimizer_text(record)}: {_ONE_RATE}"),
        (unproven, "A gain of FedSign is no proof of alignment: add own-sign and hinge to --methods to see."),
        (record.table("faults") and not exact, _NOT_COUNTED),
        (settings["engine"] == "flower", _FLOWER),
        (of_text(record), _ONE_ROW),
        (of_text(record) and settings["trained"] == "lora" and list(names) == ["fedavg"], _FACTORS),
        (settings["privacy"] != "none", _UNCOUNTED),
        (settings["privacy"] != "none", _SEEDED_NOISE),
        (settings.get("aggregation") == "secure", _SEEN),
        (settings.get("batch_norm") == "local", _LOCAL),
    )


def deeper(record: Record) -> str:
    """The command for a closer look."""
    settings = record.settings
    optimizer = settings.get("optimizer", "sgd")
    how = "" if optimizer == "sgd" else f" --optimizer {optimizer}"
    how += "" if settings["lr"] in (None, RATES[optimizer]) else f" --lr {settings['lr']:g}"
    if of_text(record):
        start = f"sparing federate {settings['model']} --data {settings['data']} --split {settings['split']}"
        more = f"--rounds {2 * settings['rounds']} --seed {settings['seed'] + 1}"
        return f"{start} --methods {' '.join(settings['methods'])}{how} {more}"
    names = list(dict.fromkeys([*settings["methods"], "own-sign", "hinge"]))
    split = f"--dirichlet.alpha {settings['dirichlet']['alpha']:g}"
    net = f"--net {settings['net']} {split}{how} --rounds {2 * settings['rounds']}"
    return f"sparing federate --methods {' '.join(names)} --data {settings['data']} {net} --seed {settings['seed'] + 1}"


def facts(record: Record) -> dict[str, Any]:
    """What reproduces the run, beside its command."""
    (data,) = record.table("data")
    settings = record.settings
    named = (
        f"{hub.title(Path(settings['model']))}, {settings['trained']} trained" if of_text(record) else settings["net"]
    )
    return {
        "model": f"{named}, {format_number(data['parameters'])} parameters",
        "engine": ", ".join(dict.fromkeys(row["engine"] for row in record.table("methods"))),
        "go deeper": deeper(record),
        "source": LORA_SOURCES if of_text(record) else PAPER,
    }


LORA_SOURCES: Final = "FedEx-LoRA (arXiv:2410.09432), FLoRA (arXiv:2409.05976), FFA-LoRA (arXiv:2403.12313)"

TEXT_REACHED: Final = ("method", "loss", "perplexity", "accuracy", "n", "validation_loss", "seconds")
REACHED: Final = ("method", "accuracy", "n", "last_ten", "validation_accuracy", "loss", "seconds")
SIGNS: Final = ("method", "force", "ssr_global", "ssr_pairs", "norm")


def loss_of_text(record: Record) -> Figure | None:
    """Loss over rounds, of a language model."""
    return LOSS(record) if of_text(record) else None


PAGE: Final = RunPage(
    lambda record: f"Federated: {', '.join(LABELS[name] for name in record.settings['methods'])}",
    answer,
    Chapter(
        "Accuracy",
        accuracy_text,
        ACCURACY,
        loss_of_text,
        Rows(
            lambda record: [] if of_text(record) else record.table("methods"),
            "The last global model",
            REACHED,
            _SHARES,
            roles=roles,
        ),
        Rows(
            lambda record: record.table("methods") if of_text(record) else [],
            "The last global model",
            TEXT_REACHED,
            "n: test tokens. Seconds: of training.",
            roles=roles,
        ),
        Rows("pairs", "Two methods on the same rows", note=_PAIRS, folded=FEW, roles=roles),
    ),
    Chapter(
        "Do signs agree?",
        lambda record: (
            f"{_SIGNS}\n\n{_FORCE}" if any(is_finite(r["force"]) for r in record.table("methods")) else _SIGNS
        ),
        KEPT,
        SHARED,
        Rows(
            lambda record: record.table("methods") if KEPT(record) or SHARED(record) else [],
            "Signs in the last round",
            SIGNS,
            _SSR,
            roles=roles,
        ),
    ),
    Chapter("What averaging gains", _GAP, GAP),
    Chapter("Length and direction", _WEIGHTS, NORM, COSINE),
    Chapter("Who holds what", partition_text, partition_figure, Rows("partition", "Rows of each client", folded=True)),
    Chapter(
        "The price",
        price_text,
        bytes_figure,
        Rows(price_rows, "Predicted and counted", note=_OFF, folded=5 * FEW, terminal=False, roles=roles),
    ),
    Chapter(
        "Privacy", privacy_text, Rows("privacy", "What the models tell of a client", note=_PRIVATE_TABLE, roles=roles)
    ),
    Chapter("Faults", faults_text, Rows("faults", "Left out", note=_LEFT_OUT, roles=roles), words_alone=True),
    caveats=caveats,
    facts=facts,
)

write_page = PAGE.write
