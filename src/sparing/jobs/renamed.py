"""Flags and values that were called otherwise in version 0.1, for scripts that still have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FLAGS: Mapping[str, Mapping[str, str]] = {
    "adapt": {
        "model": "the argument MODEL", "books": "--data", "context": "--question-length", "lr": "--inner-lr",
        "clip": "--outer-clip", "directions": "--forward.directions", "held": "--held-out-documents",
        "looks": "--measurements",
    },
    "condense": {
        "directions": "--forward.directions", "chunk": "--forward.chunk", "truncate": "--truncated.steps",
        "terms": "--neumann.terms or --conjugate-gradient.iterations", "neumann-step": "--neumann.step",
        "damping": "--conjugate-gradient.damping", "first-phase": "--two-phase.first",
        "eval-steps": "--evaluation.steps", "eval-lr": "--evaluation.lr", "eval-nets": "--evaluation.nets",
        "looks": "--measurements", "held-out": "--held-out-images",
    },
    "federate": {
        "method": "--methods", "rows": "--train-rows", "validation": "--held-out", "alpha": "--dirichlet.alpha",
        "rule": "--dirichlet.rule", "shards": "--shards.per-client", "batch-size": "--batch", "decay": "--schedule",
        "every": "--evaluate-every", "weights": "--weighting", "gamma": "--fedsign.gamma",
        "reduction": "--fedsign.reduction", "temperature": "--fedsign.temperature",
        "mu": "--fedprox.mu or --moon.mu", "moon-temperature": "--moon.temperature",
        "feddyn-alpha": "--feddyn.alpha", "pan-periods": "--fedpan.periods", "pan-amplitude": "--fedpan.amplitude",
        "trim": "--trimmed.share", "hostile": "--krum.hostile", "keep": "--krum.keep",
        "clip-norm": "--robust-clip.norm",
    },
    "finetune": {"lisa.masters": "--masters", "lisa.no-masters": "--no-masters"},
    "invert": {
        "lr": "--outer-lr", "directions": "--numerical.directions", "law": "--numerical.law",
        "probe": "--numerical.probe",
    },
    "merge": {
        "how": "--method", "net": "--entry", "weights": "--model-weights", "linear.weights": "--model-weights",
        "scale": "--factor", "keep": "--ties.keep", "drop": "--dare.drop",
    },
    "plan": {
        "model": "the argument MODEL", "active": "--lisa.active", "period": "--lisa.period",
        "lisa.masters": "--masters", "lisa.no-masters": "--no-masters", "ranks": "--lora.ranks",
    },
    "pretrain": {
        "context": "--length", "eval-every": "--evaluate-every", "checkpoint-every": "--save-every",
        "drop": "--mask-updates.share", "every": "--mask-updates.every", "until": "--mask-updates.until",
    },
    "scan": {"groups": "--parameter-groups", "widths": "--distances"},
    "transfer": {
        "model": "--family", "text": "--data", "rates": "--log2-rates", "stds": "--log2-stds",
        "warmup": "--warmup-share", "final": "--final-share", "every": "--mask-updates.every", "scale": "--follow",
    },
}  # fmt: skip
"""Verb -> old flag -> what it is called now."""

VALUES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "transfer": {"masks": {"constant-fan-in": "fan-in", "exact-count": "exact"}, "optimizer": {"adam": "adamw"}},
}
"""Verb -> flag -> old value -> what it is called now."""


def new_name(verb: str, words: Sequence[str]) -> str:
    """The line that answers the first old flag or value among the words of a command; empty where there is none."""
    flag = ""
    for word in words:
        value = word
        if word.startswith("--"):
            flag, _, value = word.removeprefix("--").partition("=")
            flag = flag.replace("_", "-")
            if flag in FLAGS.get(verb, {}):
                return f"{verb}: --{flag} is now {FLAGS[verb][flag]}"
        known = VALUES.get(verb, {}).get(flag, {})
        if value in known:
            return f"{verb}: --{flag} {value} is now --{flag} {known[value]}"
    return ""
