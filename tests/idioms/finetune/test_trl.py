"""What TRL learns of the same rows: the tokens and masks of its SFTTrainer, and its marks in templates of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

import zoo
from idioms.finetune.test_data import tokenizer
from sparing.jobs.lm.labels import IGNORED, all_tokens
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.packing import pack
from sparing.jobs.lm.records import example

TEMPLATES = Path(trl.__file__).parent / "chat_templates"  # of each family, as its authors have it and with marks by TRL

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TWO = {"messages": [*HELLO, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
TOOLS = {
    "messages": [
        HELLO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "3"}, {"role": "assistant", "content": "So."},
    ],
    "tools": [TOOL],
}  # fmt: skip


def of_family(name: str) -> Any:
    return tokenizer((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))


SAME = [
    *((name, "two") for name in ("cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5")),
    *((name, kind) for name in ("lfm2_v2", "qwen3_instruct_2507", "qwen3_vl") for kind in ("two", "tools")),
]


@pytest.mark.parametrize(("family", "kind"), SAME)
def test_what_is_learnt_is_what_trl_marks_by_hand(family: str, kind: str) -> None:
    """Ours from the template of the family as it is, TRL's from the one it edited, by the mask of transformers."""
    row = example({"two": TWO, "tools": TOOLS}[kind], "line 1", set())
    plain, marked = of_family(family), of_family(f"{family}_training")
    (ours,) = all_tokens(plain, [row])
    told = marked.apply_chat_template(
        list(row.messages), tools=list(row.tools) or None, return_assistant_tokens_mask=True, return_dict=True
    )
    assert ours.ids == told["input_ids"]
    assert [int(label != IGNORED) for label in ours.labels] == told["assistant_masks"]
    assert all_tokens(marked, [row]) == [ours]


def learnt(made: Any, row: dict[str, Any]) -> list[str]:
    return [
        made.decode([label for label in tokens.labels if label != IGNORED])
        for tokens in all_tokens(made, [example(row, "line 1", set())])
    ]


def test_templates_that_rewrite_or_mark_too_much() -> None:
    """Qwen3 drops earlier thoughts, so turns are records of their own; TRL's marks for Qwen2.5 take in the header."""
    thought = "<think>\n\n</think>\n\n{}<|im_end|>\n"
    assert learnt(of_family("qwen3"), TWO) == [thought.format("Hello"), thought.format("So.")]
    whole = ["Hello<|im_end|>\nSo.<|im_end|>\n"]
    assert learnt(of_family("qwen2_5"), TWO) == learnt(of_family("qwen2_5_training"), TWO) == whole
    # today's date is in the header
    assert learnt(of_family("llama3_2"), TWO) == ["Hello<|eot_id|>So.<|eot_id|>"]
    # earlier answers end in another token than the last
    assert learnt(of_family("gptoss"), TWO) == [
        "<|channel|>final<|message|>Hello<|return|>", "<|channel|>final<|message|>So.<|return|>",
    ]  # fmt: skip


def prepared(rows: list[dict[str, Any]], made: Any, out: Path, **changes: Any) -> Any:
    args = trl.SFTConfig(output_dir=str(out), report_to=[], use_cpu=True, bf16=False, max_length=64, **changes)
    model = zoo.llama(layers=1, vocab=300, dtype=torch.float32)
    return trl.SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=made)


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PAIR = {"prompt": "2+2=", "completion": "4"}
SPOKEN = {"prompt": TWO["messages"][:3], "completion": TWO["messages"][3:]}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("row", "changes"),
    [(PAIR, {}), (SPOKEN, {}), (TWO, {"assistant_only_loss": True})],
    ids=["prompt and completion", "messages of them", "assistant only"],
)
def test_the_trainer_of_trl_learns_the_same(row: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """The batch that its own collator makes; and its loss is ours, packed too."""
    made = tokenizer(MARKED)
    job = prepared([row, row], made, tmp_path, **changes)
    batch = next(iter(job.get_train_dataloader()))
    (ours,) = all_tokens(made, [example(row, "line 1", set())])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert ids == ours.ids
    assert labels[1:] == ours.labels[1:]
    told = job.model(input_ids=batch["input_ids"][:1], labels=batch["labels"][:1], use_cache=False).loss.item()
    for packing in (False, True):
        rows = pack([ours, ours], length=2 * len(ours.ids), pad=0, packing=packing)
        mean = sum(loss_sum(job.model, rows, torch.tensor([at])).item() for at in range(rows.rows)) / rows.tokens
        # means of float32 losses over a few tokens
        assert mean == pytest.approx(told, rel=1e-5)
