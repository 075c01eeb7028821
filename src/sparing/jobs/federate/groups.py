"""Settings that belong to one choice of `sparing federate`: ``--fedsign.gamma``, ``--lora.rank``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from sparing.jobs.limits import Between, Count, Group, Length, LiveShare, ShareBelowOne, Size, SizeOrZero


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Group, name="dirichlet", flag="split", choices=("dirichlet",)):
    """Settings of the uneven split, used by `--split dirichlet`."""

    alpha: Size = 0.5
    """Concentration α of the draw, > 0: small is uneven."""

    rule: Literal["classes", "clients"] = "classes"
    """A draw over clients for each class, or over classes for each client."""


@dataclass(frozen=True, kw_only=True)
class Shards(Group, name="shards", flag="split", choices=("shards",)):
    """Settings of the split by label, used by `--split shards`."""

    per_client: Count = 2
    """Label shards of each client (count)."""


@dataclass(frozen=True, kw_only=True)
class FedSign(Group, name="fedsign", flag="methods", choices=("fedsign", "own-sign", "hinge", "norm-matched")):
    """Settings of FedSign and its controls, used by `--methods fedsign`, `own-sign`, `hinge` and `norm-matched`."""

    gamma: float = 0.01
    """Strength γ; the paper's grid is 0.001, 0.01, 0.1."""

    reduction: Literal["tensor_mean", "sum", "mean"] = "tensor_mean"
    """How the sum over elements is weighed: γ over tensors, γ, or γ over elements and tensors."""

    temperature: float | Literal["scale-aware"] = 1.0
    """Temperature τ, in units of the weights; hinge has none."""


@dataclass(frozen=True, kw_only=True)
class FedProx(Group, name="fedprox", flag="methods", choices=("fedprox",)):
    """Settings of FedProx, used by `--methods fedprox`."""

    mu: float = 0.01
    """Strength μ of the pull towards the global model."""


@dataclass(frozen=True, kw_only=True)
class Moon(Group, name="moon", flag="methods", choices=("moon",)):
    """Settings of MOON, used by `--methods moon`."""

    mu: float = 1.0
    """Strength μ of the contrast."""

    temperature: float = 0.5
    """Temperature τ of the contrast."""


@dataclass(frozen=True, kw_only=True)
class FedDyn(Group, name="feddyn", flag="methods", choices=("feddyn",)):
    """Settings of FedDyn, used by `--methods feddyn`."""

    alpha: float = 0.01
    """Strength α, > 0."""


@dataclass(frozen=True, kw_only=True)
class FedPan(Group, name="fedpan", flag="methods", choices=("fedpan",)):
    """Settings of FedPAN, used by `--methods fedpan`."""

    periods: float = 1.0
    """Periods of the sine across the channels of a layer, T."""

    amplitude: float = 0.05
    """Height of the sine, A."""


@dataclass(frozen=True, kw_only=True)
class Trimmed(Group, name="trimmed", flag="robust", choices=("trimmed",)):
    """Settings of the trimmed mean, used by `--robust trimmed`."""

    share: float = 0.2
    """Share of the clients left out at each end (0 to 0.5)."""


@dataclass(frozen=True, kw_only=True)
class Krum(Group, name="krum", flag="robust", choices=("krum", "bulyan")):
    """Settings of Krum and Bulyan, used by `--robust krum` and `bulyan`."""

    hostile: int = 1
    """Hostile models in a round that it reckons with (count)."""

    keep: Count | None = None
    """Models whose mean Krum takes (count); 1 loses much where clients differ; none: all but the hostile ones."""


@dataclass(frozen=True, kw_only=True)
class RobustClip(Group, name="robust_clip", flag="robust", choices=("clip", "centered")):
    """Settings of clipped updates, used by `--robust clip` and `centered`."""

    norm: Size = 1.0
    """Largest norm of a client's update, or in centred clipping of its distance from the rest."""


@dataclass(frozen=True, kw_only=True)
class Trust(Group, name="trust", flag="robust", choices=("fltrust",)):
    """Settings of FLTrust, used by `--robust fltrust`."""

    rows: Count = 100
    """Held-out rows on which the server trains, to compare clients with itself (count); no accuracy is taken on
    them."""


@dataclass(frozen=True, kw_only=True)
class Privacy(Group, name="private", flag="privacy", choices=("server", "clients")):
    """Settings of client-level differential privacy, used by `--privacy server` and `clients`."""

    noise: SizeOrZero = 1.0
    """Noise multiplier z: standard deviation of the noise on the sum of updates, in clipping norms; 0: a control
    without privacy."""

    clip: Size = 1.0
    """Norm to which each client's update is shortened, in units of the weights."""

    quantile: LiveShare | None = None
    """Share of updates that should be shorter than the norm (0 to 1), which then follows them; none: it stays."""

    delta: LiveShare | None = None
    """Probability δ with which ε may fail (0 to 1); none: clients^−1.1."""


@dataclass(frozen=True, kw_only=True)
class Secure(Group, name="secure", flag="aggregation", choices=("secure",)):
    """Settings of secure aggregation, used by `--aggregation secure`."""

    bound: Size = 8.0
    """Largest element of an update, in units of the weights; a client beyond it sends nothing and is named."""

    bits: Literal[16, 24, 32, 40, 48, 56, 64] = 32
    """Bits that travel for each element (count)."""

    step: Size = 2.0**-20
    """What elements are rounded to multiples of, in units of the weights."""

    threshold: ShareBelowOne = 0.5
    """Share of the round's clients (0 to below 1) of which more must stay until the sum is unmasked."""

    signed: bool = False
    """Whether clients sign their keys and who took part as they were told, so that a lying server gets nothing."""

    dropout: ShareBelowOne = 0.0
    """Share of the clients (0 to below 1) that leaves before each exchange, to see what it costs."""


@dataclass(frozen=True, kw_only=True)
class Late(Group, name="late", flag="delays", choices=("lognormal",)):
    """Settings of simulated delays, used by `--delays lognormal`."""

    median: Size = 1.0
    """Median time until an update is with the server (seconds); nobody really waits."""

    spread: SizeOrZero = 0.5
    """Standard deviation of the logarithm of the time; half of its variance is the client's own, half the round's."""

    gone: ShareBelowOne = 0.0
    """Share of the clients that never answer (0 to below 1); each is drawn for itself."""

    patience: Size = 60.0
    """Time that a round waits for an answer (seconds); a client that was late then is not waited for again until it
    answers in time."""


@dataclass(frozen=True, kw_only=True)
class Lora(Group, name="lora", flag="trained", choices=("lora",)):
    """Settings of the low-rank additions to a language model, used by `--trained lora`.

    Source: Hu et al. 2022 (arXiv:2106.09685), where the paper writes r for ``rank`` and α for ``alpha``.
    """

    rank: Count = 8
    """Inner width of each addition (count); the paper's r."""

    alpha: Size = 16.0
    """Numerator of the scale α / r of each addition (ratio)."""

    targets: str = "all-linear"
    """Which linear layers get one: `all-linear` (all but the head), or module names (`q_proj,v_proj`)."""


@dataclass(frozen=True, kw_only=True)
class Text(Group, name="text"):
    """Settings of clients that hold texts, used with a language model."""

    client: str = ""
    """Field of each record that names its client, where `--data` is one file; in a folder each file is a client."""

    length: Length = 256
    """Row length (tokens): a longer text goes on in another row."""

    test: Annotated[float, Between(above=True, below=True)] = 0.1
    """Share of each client's rows, its last ones, that are test rows (0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class Table(Group, name="table"):
    """Settings of rows in files: `--data` is a .csv, .parquet or .npz file, what save_to_disk wrote, or a folder."""

    label: str = "label"
    """Column of the class: whole numbers from 0, or names, which are sorted; all other columns are inputs."""

    client: str = ""
    """Column that names each row's client, for `--split natural`; in a folder each file or folder is a client."""

    test: Annotated[float, Between(above=True, below=True)] = 0.2
    """Share of the rows, of each client where clients are known, that are test rows, drawn at random (0 to 1); unused
    where the data have test rows of their own."""
