"""The recipes that ``recipe_check`` runs through mergekit and through ours, on tiny models with random weights.

Those of the first part are mergekit's example files (github.com/arcee-ai/mergekit, examples/) with a tenth of the
layers, its dtype float32 and, of ``ties.yml``, the method name of today; those of the second try every method.
"""

from __future__ import annotations

EXAMPLES = {
    "linear.yml": """
models:
  - model: orca
    parameters: {weight: 1.0}
  - model: wizard
    parameters: {weight: 0.3}
  - model: platypus
    parameters: {weight: 0.5}
merge_method: linear
dtype: float32
""",
    "bio-merge.yml": """
models:
  - model: orca
    parameters: {density: 0.5, weight: 0.5}
  - model: wizard
    parameters: {density: 0.5, weight: 0.5}
merge_method: ties
base_model: base
parameters: {normalize: false, int8_mask: true}
dtype: float32
""",
    "gradient-slerp.yml": """
slices:
  - sources:
      - {model: orca, layer_range: [0, 4]}
      - {model: platypus, layer_range: [0, 4]}
merge_method: slerp
base_model: orca
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
    - value: 0.5
dtype: float32
""",
    "orcamini-platy-44layer.yml": """
slices:
  - sources: [{model: orca, layer_range: [0, 3]}]
  - sources: [{model: platypus, layer_range: [2, 4]}]
merge_method: passthrough
dtype: float32
""",
    "gpt2-small.yml": """
slices:
  - sources: [{model: gpt2, layer_range: [0, 2]}]
merge_method: passthrough
dtype: float32
""",
    "mega.yml, second half": """
models:
  - model: orca
    parameters: {density: [1, 0.7, 0.1], weight: 1.0}
  - model: wizard
    parameters:
      density: 0.33
      weight: [{filter: mlp, value: 0.5}, {value: 0}]
merge_method: ties
base_model: base
parameters: {normalize: true, int8_mask: true}
dtype: float32
""",
    "ties.yml": """
models:
  - model: orca
    parameters: {density: [0.8, 0.3, 0.1], weight: [1.0, 0.8, 0.5]}
  - model: wizard
    parameters: {density: [0.1, 0.4, 0.1], weight: [0.2, 0.8, 0.1]}
  - model: platypus
    parameters: {density: [0.1, 0.2, 0.6], weight: [0.5, 0.8, 1.0]}
merge_method: ties
base_model: base
dtype: float32
""",
}


def of(method: str, *, models: tuple[str, ...] = ("orca", "wizard"), base: str | None = "base", weight: str = "0.5",
       extra: str = "{}", last: str = "") -> str:  # fmt: skip
    """A recipe of whole models with one weight for each."""
    named = "".join(f"  - model: {model}\n    parameters: {{weight: {weight}}}\n" for model in models)
    named = named.replace("    parameters: {weight: none}\n", "")
    head = f"base_model: {base}\n" if base else ""
    return f"models:\n{named}merge_method: {method}\n{head}parameters: {extra}\ndtype: float32\n{last}"


THREE = ("orca", "wizard", "platypus")
METHODS = {
    "linear, not normalised": of("linear", base=None, weight="0.7", extra="{normalize: false}"),
    "linear, negative weight": of("linear", base=None, weight="[1.0, -0.2]"),
    "task_arithmetic": of("task_arithmetic", models=THREE, extra="{lambda: 0.6}"),
    "task_arithmetic, normalised": of("task_arithmetic", models=THREE, weight="-0.5", extra="{normalize: true}"),
    "nuslerp": of("nuslerp", base=None, weight="[0.2, 0.7]"),
    "nuslerp, base": of("nuslerp", weight="[0.2, 0.7]"),
    "nuslerp, rows": of("nuslerp", base=None, extra="{nuslerp_flatten: false}"),
    "nuslerp, columns": of("nuslerp", extra="{nuslerp_flatten: false, nuslerp_row_wise: true}"),
    "multislerp": of("multislerp", models=THREE, base=None),
    "multislerp, base": of("multislerp", models=THREE),
    "karcher": of("karcher", models=THREE, base=None, weight="none"),
    "model_stock": of("model_stock", models=THREE, weight="none"),
    "model_stock, filter-wise": of("model_stock", models=THREE, weight="none", extra="{filter_wise: true}"),
    "breadcrumbs": of("breadcrumbs", extra="{density: 0.6, gamma: 0.03}"),
    "breadcrumbs_ties": of("breadcrumbs_ties", models=THREE, extra="{density: 0.6, gamma: 0.03}"),
    "sce": of("sce", models=THREE, weight="none", extra="{select_topk: 0.3}"),
    "sce, all": of("sce", models=THREE, weight="none"),
    "dare_linear, density 1": of("dare_linear", models=THREE),
    "dare_ties, density 1": of("dare_ties", models=THREE),
    "della, density 1": of("della", models=THREE),
    "della_linear, density 1": of("della_linear", models=THREE),
    "passthrough, scaled": of("passthrough", models=("orca",), base=None, weight="none", extra="{scale: 0.5}"),
    "slerp, gpt2": of("slerp", models=("gpt2", "gpt2-b"), base="gpt2", weight="none", extra="{t: [0, 1]}"),
    "union of vocabularies": of("ties", models=("orca", "chat"), last="tokenizer: {source: union}\n"),
    "base vocabulary": of("linear", models=("orca", "chat"), base=None, last="tokenizer_source: orca\n"),
    "adapter": of("task_arithmetic", models=("orca", "base+adapter")),
}

# Methods that draw at random; mergekit's result shows which elements it kept, and ours has others. What both must do
# alike is the factor of what stays: the L1 norm of the task vector
RANDOM = {
    "dare_linear": of("dare_linear", models=("orca",), weight="1.0", extra="{density: 0.5}"),
    "della_linear": of("della_linear", models=("orca",), weight="1.0", extra="{density: 0.5, epsilon: 0.2}"),
}
