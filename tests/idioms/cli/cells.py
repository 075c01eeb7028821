"""What people do on the command line × verb."""

from __future__ import annotations

from idioms.table import Cell

STANDING = "standing in a repository whose configuration names a program"

WRITES = (
    "finetune", "plan", "pretrain", "transfer", "condense", "adapt", "attribute", "scan", "merge", "federate", "invert",
    "evaluate", "compare", "probe", "demo",
)  # fmt: skip
"""Verbs that write a folder."""

VERBS = (*WRITES, "fetch")

RESUMES = tuple(verb for verb in WRITES if verb not in {"plan", "compare", "probe"})
"""Verbs that go on where they stopped."""

READS_MODELS = ("finetune", "plan", "adapt", "scan", "merge", "evaluate")
"""Verbs that open a directory of transformers."""

COUNTS = {
    "finetune": "length", "plan": "length", "pretrain": "length", "transfer": "batch", "condense": "batch",
    "adapt": "documents", "attribute": "retrain", "scan": "workers", "merge": "rows", "federate": "workers",
    "invert": "save-every", "evaluate": "length", "probe": "per-group",
}  # fmt: skip
"""A setting that counts, of each verb that has one."""

OTHERS = {
    "finetune": "--lr=0.5", "pretrain": "--lr=0.5", "transfer": "--steps=11", "condense": "--outer-lr=0.5",
    "adapt": "--inner-lr=0.5", "attribute": "--lr=0.5", "scan": "--norm=raw", "merge": "--points=5",
    "federate": "--lr=0.5", "invert": "--noise=0.1", "evaluate": "--batch=2",
    "demo": "--seed=1",
}  # fmt: skip
"""A setting that makes it another run."""

LINES = {
    STANDING: None, "--json": None, "another's record in --out": "holds another run (record.jsonl",
    "another's record in --out, --overwrite": "no run wrote its",
    "a finished run in --out": "holds another run (run.json",
    "a run at work in --out, --overwrite": "another run is at work in it", "--out below a file": "cannot be written",
    "--resume where nothing was begun": "no run was started there",
    "--resume with another setting": "began with|must reach the same bits",
    "--resume and --overwrite": "pass one of them", "a count of 10^30": "pass ",
    "a setting that is none": "nrecognized", "a configuration nested 10,000 deep": "config.json is broken",
    "architectures: true": "architectures is no list of names|mend the file that is wrong",
    "a model that brings code": "code of others is not run|mend the file that is wrong",
    "a model of minus one layer": "num_hidden_layers is -1|n_layer is -1|mend the file that is wrong",
    "a chat template without end": "the chat template refuses it",
}  # fmt: skip
"""Idiom, and what its refusal says (one of several: a merge sees first that two models differ); None where it must
work."""

SUBJECTS = {
    STANDING: VERBS, "--json": VERBS, "another's record in --out": WRITES,
    "another's record in --out, --overwrite": WRITES, "a finished run in --out": WRITES,
    "a run at work in --out, --overwrite": WRITES, "--out below a file": WRITES,
    "--resume where nothing was begun": RESUMES, "--resume with another setting": tuple(OTHERS),
    "--resume and --overwrite": RESUMES, "a count of 10^30": tuple(COUNTS), "a setting that is none": VERBS,
    "a configuration nested 10,000 deep": READS_MODELS, "architectures: true": READS_MODELS,
    "a model that brings code": READS_MODELS, "a model of minus one layer": READS_MODELS,
    "a chat template without end": ("finetune", "scan"),
}  # fmt: skip

CELLS = tuple(
    Cell(idiom, verb, "equal" if LINES[idiom] is None else "refused")
    for idiom, verbs in SUBJECTS.items()
    for verb in verbs
)
