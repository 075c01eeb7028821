"""Claims on asymmetric valleys and on FedSign: Li et al. 2024, arXiv:2405.12489."""

from __future__ import annotations

from benchmarks.claims.sources import MINUS, Claim, Found, Pages, ends, number, rows_of

NET = "VGG, BN, Fashion"
NETS = (
    "VGG, BN, Fashion",
    "VGG, no norm, Fashion",
    "ResNet, BN, CIFAR",
    "VGG, BN, MNIST",
    "VGG, GroupNorm, Fashion",
    "GPT-2, characters",
)


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", MINUS)


def _sides(see: Pages) -> Found:
    rows = see.table("valley", "valley-noises")
    means = {
        net: [number(row["AI error, consistent"]) for name, row in rows.items() if name.startswith(f"{net}:")]
        for net in NETS
    }
    curves = [
        row["error"]["ai"]
        for part in ("noises", "text")
        for key, row in rows_of(f"valley_{part}").items()
        if key.endswith(" consistent")
    ]
    known = [value for value in curves if value is not None]
    losses = [number(row["AI loss, consistent"]) for name, row in rows.items() if name.startswith("VGG, no norm")]
    long = [row for name, row in rows.items() if name.startswith("GPT-2, characters, 2,400 steps:")]
    later, turned = ([number(row[f"AI {metric}, consistent"]) for row in long] for metric in ("error", "loss"))
    said = (
        f"The + side is the flat one in {sum(value > 0 for value in known)} of {len(known)} sign-consistent curves of "
        f"the error, with and without norm and in a small GPT-2; mean AI by noise {min(means['VGG, BN, MNIST']):.2f} "
        f"to {max(means['VGG, BN, MNIST']):.2f} on MNIST, {min(means[NET]):.2f} to {max(means[NET]):.2f} on "
        f"Fashion-MNIST, {min(means['GPT-2, characters']):.2f} to {max(means['GPT-2, characters']):.2f} in the GPT-2. "
        f"In loss it does not hold without norm ({min(losses):.2f} to {max(losses):.2f}). In the GPT-2 trained eight "
        f"times as long it all but vanishes in error ({min(later):.2f} to {max(later):.2f}) and turns in loss "
        f"({_signed(min(turned))} to {_signed(max(turned))})."
    )
    return Found(said, "5 seeds, 7 noises, 7 nets", min(known) > 0 and max(losses) < 0.35)


def _ratio(see: Pages) -> Found:
    row = see.table("valley", "valley-ratio-laws")[NET]
    said = (
        f"Pearson {row['Pearson, AI error']} of the share of equal signs and AI over single curves; Kendall's τ of the "
        f"share and the mean error {row['Kendall, error −']} on the − side, {row['Kendall, error +']} on the + side."
    )
    return Found(
        said, f"{row['n']} seeds", number(row["Pearson, AI error"]) > 0.9 and ends(row["Kendall, error +"])[1] < 0
    )


def _start(see: Pages) -> Found:
    row = see.table("valley", "valley-special")["VGG, no norm, Fashion: θ₀"]
    said = (
        f"Not here: without norm θ₀ has AI {row['AI error']} in error, and shares {100 * number(row['SCR']):.0f} % of "
        "its signs with the trained weights after eight epochs."
    )
    return Found(said, f"{row['n']} seeds", ends(row["AI error"])[0] > 0.35)


def _scales(see: Pages) -> Found:
    rows = see.table("valley", "valley-scales")
    said, holds = [], []
    for net in (NET, "ResNet, BN, CIFAR"):
        cells = [rows[f"{net}: {name}"]["AI error, norm weights"] for name in ("ones", "U(0, 1)", "G(0, 0.1)")]
        said.append(f"{cells[0]} from ones, {cells[1]} from U(0, 1) and {cells[2]} from G(0, 0.1) ({net})")
        low, high = ends(cells[2])
        holds.append(ends(cells[0])[0] > 0.35 and ends(cells[1])[0] > 0.35 and low < 0 < high)
    text = f"Along {{0, 1}} on those weights AI is {'; '.join(said)}."
    return Found(text, f"{rows[f'{NET}: ones']['n']} seeds, two nets", all(holds))


def _settings(see: Pages) -> Found:
    rows = see.table("valley", "valley-hyper")
    raw = [abs(number(row["AI error, raw"])) for row in rows.values()]
    kept = [number(row["AI error, consistent"]) for row in rows.values()]
    width = [number(row["raw half-width at +0.5 nat, λ"]) for row in rows.values()]
    said = (
        f"Over {len(rows)} settings raw means stay within {max(raw):.2f} of even, sign-consistent ones between "
        f"{min(kept):.2f} and {max(kept):.2f}; half-widths go from {min(width):.2f} to {max(width):.2f} ‖θ‖."
    )
    return Found(said, "5 seeds", max(raw) < 0.35 and min(kept) > 0.7)


def _batches(see: Pages) -> Found:
    row = see.table("valley", "valley-line-ends")["16 and 512 to the end: λ = 1"]
    said = (
        "Not reproduced, also where both nets have one training loss "
        f"({row['training loss, nat'].split(' ')[0]} nat): from the large-batch net the line goes down towards the "
        f"small-batch net and up beyond (AI {row['AI error']})."
    )
    return Found(said, f"{row['n']} seeds", number(row["AI error"]) < 0)


def _steering(see: Pages) -> Found:
    rows = see.table("valley", "valley-steering")
    steps = [float(part) for start in ("scratch", "pretrained") for part in rows[f"{start}, sign"]["steps"].split(",")]
    beyond = [rows[f"{start}, sign"]["beyond it"] for start in ("scratch", "pretrained")]
    said = (
        f"No: the best step along the signs goes to the other side in {sum(step < 0 for step in steps)} of "
        f"{len(steps)} averages, and gains {beyond[0]} nat (from scratch) and {beyond[1]} (pretrained) beyond plain "
        "shrinking."
    )
    return Found(said, f"{rows['scratch, sign']['n']} seeds", max(steps) < 0 and max(map(number, beyond)) < 0)


def _halves(see: Pages) -> Found:
    rows, column = see.table("valley", "valley-soups"), "gap in error, points"
    pre, first, last, other = (
        rows[f"{NET}: {where}"][column] for where in ("pretrained, 10", "scratch, 1", "scratch, 10", "strangers, 10")
    )
    rank = see.table("valley", "valley-predictions")["weights: all"]
    said = (
        f"Roughly. After ten epochs the average of two halves is off its members by {pre} points from a pretrained "
        f"net, {last} from scratch (after one epoch {first}), {other} from different starts. Over all pairs a "
        f"prediction from the weights ranks them with Spearman {rank['Spearman, error']}; the share of signs alone "
        "does not."
    )
    return Found(
        said, f"5 seeds; {rank['n']} pairs", number(pre) < 0 < number(last) < number(other) and number(first) < 0
    )


def _ahead(see: Pages) -> Found:
    rows, column = see.table("federated", "federated-differences"), "mean over α"
    cases = {
        "Fashion-MNIST": "fashion-mnist MLP",
        "MNIST-1D": "mnist-1d MLP",
        "MNIST-1D with batch norm": "mnist-1d MLP, BN",
        "CIFAR-10": "cifar10 CNN, BN",
    }
    sign = {title: rows[f"{case}: FedSign − FedAvg"] for title, case in cases.items()}
    rivals = {
        name: [
            number(rows[f"{case}: {name} − FedAvg"][column]) - number(sign[title][column])
            for title, case in cases.items()
        ]
        for name in ("FedDyn", "SCAFFOLD", "MOON")
    }
    won = [title for title, row in sign.items() if row["its interval"] == "above zero"]
    said = (
        f"Ahead of FedAvg in {len(won)} of {len(sign)} cases: "
        + "; ".join(f"{title} {row[column]}" for title, row in sign.items())
        + f" points. FedDyn is ahead of it by {min(rivals['FedDyn']):.1f} to {max(rivals['FedDyn']):.1f}, SCAFFOLD, "
        f"which the paper leaves out, by {min(rivals['SCAFFOLD']):.1f} to {max(rivals['SCAFFOLD']):.1f}; MOON less it: "
        f"{min(rivals['MOON']):+.1f} to {max(rivals['MOON']):+.1f}. The nets are small."
    )
    behind = min(min(rivals[name]) for name in ("FedDyn", "SCAFFOLD")) > 0
    return Found(said, "5 seeds, 6 settings or more each", len(won) < len(sign) and behind)


def _aligned(see: Pages) -> Found:
    signs, points = see.table("federated", "federated-weights"), see.table("federated", "federated-questions")
    column, cases = "SSR, client and global", ("mnist-1d MLP", "fashion-mnist MLP", "mnist-1d MLP, BN")
    kept = {
        arm: [100 * number(signs[f"{case}, α = 0.1: {arm}"][column]) for case in cases] for arm in ("FedSign", "FedAvg")
    }
    held = [points[f"{case}: FedSign at FedAvg's norms − FedAvg, FedSign's rate"]["mean over α"] for case in cases]
    own = [points[f"{case}: FedSign − own-sign"]["mean over α"] for case in (*cases, "cifar10 CNN, BN")]
    equal = [points[f"{case}: FedSign − own-sign at FedSign's setting"]["mean over α"] for case in cases]
    said = (
        f"FedSign's clients keep {min(kept['FedSign']):.1f} to {max(kept['FedSign']):.1f} % of the global signs, "
        f"FedAvg's {min(kept['FedAvg']):.1f} to {max(kept['FedAvg']):.1f}. But held at FedAvg's norms FedSign gains "
        f"nothing ({'; '.join(held)} points), and a push along each weight's *own* sign does as well (FedSign less "
        f"own-sign, each at its best setting: {'; '.join(own)}; both at FedSign's: {'; '.join(equal)}). It is the push "
        "outwards."
    )
    stands = (
        max(ends(cell)[0] for cell in held) <= 0
        and max(ends(cell)[0] for cell in own) <= 0
        and min(kept["FedSign"]) > max(kept["FedAvg"])
    )
    return Found(said, "5 seeds", stands)


CLAIMS = (
    Claim(
        says="Along noise with the signs of the weights the valley is flat on one side, along plain noise it is even",
        place="Figure 3",
        found=_sides,
        verdict="holds in part",
        steps=("valley_noises", "valley_text"),
        page="valley",
    ),
    Claim(
        says="The asymmetry grows with the share of equal signs",
        place="Figure 4",
        found=_ratio,
        verdict="holds",
        steps=("valley_ratio", "valley_noises"),
        page="valley",
    ),
    Claim(
        says="The initial weights are an asymmetric direction only with batch norm",
        place="Figures 5 and 16 to 19",
        found=_start,
        verdict="does not hold here",
        steps=("valley_special",),
        page="valley",
    ),
    Claim(
        says="Batch-norm weights that start symmetric take the asymmetry away",
        place="Figure 7",
        found=_scales,
        verdict="holds",
        steps=("valley_scales",),
        page="valley",
    ),
    Claim(
        says="Hyperparameters change the width of the valley, not its symmetry",
        place="Figure 9",
        found=_settings,
        verdict="holds",
        steps=("valley_hyper",),
        page="valley",
    ),
    Claim(
        says="Solutions of large batches lie in flat, asymmetric valleys",
        place="Figure 8",
        found=_batches,
        verdict="not settled",
        steps=("valley_line",),
        page="valley",
    ),
    Claim(
        says="A step to the flat side after averaging helps",
        place="ours, from the paper's picture",
        found=_steering,
        verdict="does not hold here",
        steps=("valley_steering",),
        page="valley",
    ),
    Claim(
        says="Averages of models follow the signs they share",
        place="Figure 11",
        found=_halves,
        verdict="holds in part",
        steps=("valley_soups", "valley_forecast"),
        page="valley",
    ),
)
FEDSIGN = (
    Claim(
        says="FedSign is ahead of FedAvg, FedProx, MOON, FedDyn and FedPAN",
        place="Table 1",
        found=_ahead,
        verdict="does not hold here",
        steps=("federated_methods",),
        page="federated",
    ),
    Claim(
        says="FedSign is better because the signs of its models agree",
        place="§ on FedSign, equation 1",
        found=_aligned,
        verdict="does not hold here",
        steps=("federated_methods",),
        page="federated",
    ),
)
