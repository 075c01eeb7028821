"""LISA in Hugging Face's Trainer: one callback."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sparing import layersample as ls

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=256,
)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 20))
rows = text[: 64 * (len(text) // 64)].view(-1, 64)
data = [{"input_ids": row, "labels": row} for row in rows]

callback = ls.LayerSamplingCallback(ls.LayerSampling(active=2, period=5), seed=0)
arguments = TrainingArguments(
    output_dir="trainer", max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=5,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
)  # fmt: skip
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, callbacks=[callback])
print("loss", round(trainer.train().training_loss, 2))
