"""First steps with a language model, as a script; `first_steps.ipynb` is the same as a notebook."""

# %% [markdown]
# # First steps
#
# Make a small language model, fine-tune it on rows of your own, by layer sampling (LISA) and in full, see what memory
# was predicted and what was held, and measure whether the difference is one. No GPU and no network are needed.
# Everything is written below `runs/first-steps`, with a page (`report.html`) for each run.

# %%
import json
import os
from pathlib import Path

from sparing.data import bundled_text
from sparing.jobs import evaluate, finetune, pretrain
from sparing.report import format_number

STEPS = int(os.environ.get("STEPS", "200"))  # tests take 2
OUT = Path(os.environ.get("OUT", "runs/first-steps"))
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## A model to start from
#
# Alice's Adventures in Wonderland, byte pairs, a Llama of four blocks. With a model of your own, or one on the Hugging
# Face hub, this step falls away: `base = Path("HuggingFaceTB/SmolLM2-135M")`.

# %%
(OUT / "alice.txt").write_text(bundled_text("alice"))
shape = {"width": 64, "length": 64, "vocabulary": 512, "density": 1.0, "warmup": 0, "control": False, "samples": 0}
new = {"data": (str(OUT / "alice.txt"),), "steps": STEPS, "out": OUT / "base", "overwrite": True}
pretrain.run(pretrain.Settings(**new, **shape))
base = OUT / "base" / "model"

# %% [markdown]
# ## Rows of your own
#
# One JSON object a line. `{"prompt": …, "response": …}` and conversations are taken as well; of those only the answers
# are learnt. Here: Blake's poems, of which every fifth is kept for measuring.

# %%
poems = [part.strip() for part in bundled_text("blake").split("\n\n\n") if len(part.split()) > 20]
for name, rows in {"train": [p for i, p in enumerate(poems) if i % 5], "held-out": poems[::5]}.items():
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))

# %% [markdown]
# ## Fine-tune
#
# The same rows, steps and rate, once with two of the four blocks at a time and once with all.

# %%
pace = {"lr": 1e-3, "steps": STEPS, "accumulate": 1, "batch": 8, "length": 64, "max_new_tokens": 0}
files = {"model": base, "data": (OUT / "train.jsonl",), "held_out_data": OUT / "held-out.jsonl", "overwrite": True}
for method in ("lisa", "full"):
    record = finetune.run(finetune.Settings(method=method, out=OUT / method, **files, **pace))
    before, *_, after = (row["loss"] for row in record.table("held_out"))
    total = next(row for row in record.table("memory") if row["category"] == "total")
    memory = " and measured ".join(format_number(total[kind], "B") for kind in ("predicted", "measured"))
    print(f"{method}: held-out loss {before:.2f} -> {after:.2f} nat/token; memory of a step predicted {memory}")

# %% [markdown]
# ## Is it a difference?
#
# Both models read the same poems, so the interval is of the difference poem by poem. It covers poems, not seeds.

# %%
both = {"model": OUT / "lisa" / "model", "against": OUT / "full" / "model", "data": OUT / "held-out.jsonl"}
compared = evaluate.run(evaluate.Settings(**both, length=64, out=OUT / "compared", overwrite=True))
(gap,) = compared.table("against")
size = format_number(gap["difference"], low=gap["difference_low"], high=gap["difference_high"])
print(f"LISA less full: {size} {gap['per']}, below 0 where LISA is better")
