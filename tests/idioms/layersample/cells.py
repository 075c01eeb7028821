"""What people do with layer sampling, and what they get."""

from __future__ import annotations

from idioms.layersample.interrupted import INTERRUPTED
from idioms.layersample.loops import LOOPS as LOOPS_AND_HANDS
from idioms.layersample.optimizers import OPTIMIZERS, REFUSED
from idioms.layersample.refusals import REFUSALS
from idioms.layersample.trainer_options import TRAINERS
from idioms.table import Cell

_CAUSAL = (
    "GPT-2", "GPT-Neo", "GPT-NeoX", "OPT", "BLOOM", "Falcon", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3",
    "Gemma 2", "Gemma 3", "Phi-3",
)  # fmt: skip
_OTHERS = ("Qwen2.5-VL", "Gemma 3 with pictures", "T5", "BART", "Whisper", "ViT")
LOOPS = ("plain loop", "Trainer", "SFTTrainer")
"""Three loops; SFTTrainer is for causal language models."""

FAMILY_CELLS = tuple(
    Cell(loop, name) for name in (*_CAUSAL, *_OTHERS) for loop in LOOPS if loop != "SFTTrainer" or name in _CAUSAL
)
"""Each family in each loop: the drawn blocks train, others do not, and the weights are those of the loop by hand."""

LOOP_CELLS = tuple(Cell(idiom, subject) for idiom, subject in LOOPS_AND_HANDS | INTERRUPTED)
"""Each loop: the weights are those of the loop by hand."""

REFUSAL_CELLS = tuple(Cell(idiom, subject, "refused") for idiom, subject in REFUSALS)
"""Each loop that would train something else than was drawn: refused in a line with what to do."""

_POLICIES = ("reset", "keep", "offload")
OPTIMIZER_CELLS = (
    *(Cell(f'state="{policy}"', name) for name in OPTIMIZERS for policy in _POLICIES),
    Cell('state="keep"', "Adagrad"),
    *(Cell(f'state="{policy}"', name, "refused") for name, (_, policy, _) in REFUSED.items()),
)
"""Each optimizer under each policy for the state of a block that leaves: as the same optimizer with flags by hand."""

TRAINER_CELLS = tuple(Cell(idiom, "Trainer") for idiom in TRAINERS)
"""Options of Hugging Face's Trainer."""

_NO_LINEAR = ("Mixtral", "Falcon")
LOW_BIT_CELLS = tuple(
    Cell('frozen="nf4"', name, "refused" if name in _NO_LINEAR else "equal") for name in (*_CAUSAL, *_OTHERS)
)
"""Each family with frozen blocks in 4 bits: as with frozen blocks rounded by hand. Refused: experts and Falcon's own
class of linear layers."""

CELLS = LOW_BIT_CELLS + FAMILY_CELLS + LOOP_CELLS + REFUSAL_CELLS + OPTIMIZER_CELLS + TRAINER_CELLS
"""All cells of the suite."""
