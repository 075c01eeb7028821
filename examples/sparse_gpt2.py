"""Train an unmodified GPT-2 of Hugging Face at 1/8 of its hidden weights, and export it as an ordinary checkpoint.

Rates and initial weights are those of a dense GPT-2 of a quarter of the width. The text is a string of bytes.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sparing import scaling as sc

STEPS = 60
config = GPT2Config(n_embd=128, n_head=4, n_layer=2, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40))
rows = text[: 64 * (len(text) // 64)].view(-1, 64)

torch.manual_seed(0)
model = GPT2LMHeadModel(config)
plan = sc.plan(model, base=32, density=1 / 8)  # the base is this configuration, narrowed: 32 wide, heads as large
plan.report()
masks = sc.apply_(model, plan, seed=0)
for name in list(masks)[:3]:
    print(f"{name}: {masks.density(name):.4f} of its weights live")

optimizer = torch.optim.AdamW(plan.groups(model, lr=2**-6, weight_decay=0.1))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5) * (1 - step / STEPS))
plan.check_optimizer(optimizer)
generator = torch.Generator().manual_seed(0)
model.train()
for step in range(STEPS):
    batch = rows[torch.randint(len(rows), (8,), generator=generator)]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2d}  loss {loss.item():.2f}")
plan.check_optimizer(optimizer)

model.eval()
prompt = text[:16][None]


def written(model: GPT2LMHeadModel) -> str:
    """Sixteen bytes of the text, and what the model makes of them."""
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False, pad_token_id=0
    )
    return bytes(tokens[0].tolist()).decode(errors="replace")


print("the scaled model, its multipliers in hooks:", repr(written(model)))
with torch.no_grad():
    before = model(prompt).logits
sc.fold_(model)  # multipliers go into weights; masks stay as zeros; hooks and buffers are gone
model.save_pretrained("sparse-gpt2")
loaded = GPT2LMHeadModel.from_pretrained("sparse-gpt2").eval()
with torch.no_grad():
    torch.testing.assert_close(loaded(prompt).logits, before, rtol=1e-4, atol=1e-4)  # single precision
print("from_pretrained, without this library:     ", repr(written(loaded)))
share = float((loaded.transformer.h[0].mlp.c_fc.weight == 0).float().mean())
print(f"same logits; {share:.1%} of a hidden matrix are zero")
