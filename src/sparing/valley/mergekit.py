"""Our sign-aware merge as a method of mergekit 0.1.5, under the name ``sparing_sign_aware``.

``mergekit-yaml`` loads no plug-ins, so this module is also a command that registers the method and hands over to it::

    pip install mergekit==0.1.5
    python -m sparing.valley.mergekit config.yml out/ [options of mergekit-yaml]

In the configuration ``density`` is the share of changes kept (``SignAware.keep``), ``lambda`` the factor of what is
merged (``scale``), ``majority`` the share of votes that a flip of sign must exceed, and ``weight``, one for each model,
its weight in election, mean and votes. Registering touches mergekit's public registry and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparing.errors import UserError
from sparing.valley.merging.sign_aware import SignAware

NAME = "sparing_sign_aware"  # what ``merge_method:`` says in the configuration


def merge_tensor(
    tensors: Sequence[Tensor],
    base: Tensor,
    *,
    weights: Sequence[float],
    density: float = 0.2,
    scale: float = 1.0,
    majority: float = 0.5,
    name: str = "",
) -> Tensor:
    """Merge the tensors of one name as mergekit passes them; the base where there are no others."""
    if not tensors:
        return base
    return SignAware(density, scale=scale, majority=majority, weights=tuple(weights)).tensor(name, tensors, base)


def register() -> str:
    """Register the method with mergekit in this process, once; return its name."""
    methods, base = _mergekit()
    # A name can be registered only once in a process
    if NAME not in {method.spec.name for method in methods.registered_methods()}:
        methods.register(_method(base))
    return NAME


def _mergekit() -> tuple[Any, Any]:
    try:
        from mergekit import merge_methods
        from mergekit.merge_methods import base
    except ImportError as error:
        why, do = "the method joins its registry", "pip install mergekit==0.1.5"
        raise UserError("mergekit", got=f"no {error.name}", why=why, do=do) from error
    if not hasattr(merge_methods, "registered_methods"):
        why = "it has no public registry of methods"
        raise UserError("mergekit", got="an older version", why=why, do="pip install mergekit==0.1.5")
    return merge_methods, base


def _method(base: Any) -> Any:
    shared, each = base.ParameterScope.SHARED, base.ParameterScope.NON_BASE

    def merge(group: Any, **given: Any) -> Tensor:
        others = group.non_base
        return merge_tensor(
            [entry.tensor for entry in others],
            group.base.tensor,
            weights=given["weight"].values_for(others),
            density=given["density"],
            scale=given["lambda"],
            majority=given["majority"],
            name=group.metadata.name or "",
        )

    spec = base.MergeMethodSpec(
        name=NAME,
        pretty_name="Sign-aware (sparing)",
        parameters=(
            base.ParameterSpec("density", float, shared, default=0.2),
            base.ParameterSpec("lambda", float, shared, default=1.0),
            base.ParameterSpec("majority", float, shared, default=0.5),
            base.ParameterSpec("weight", float, each, default=1.0),
        ),
        contract=base.InputContract(base=base.BasePolicy.REQUIRED),
    )
    return base.FunctionalGroupMergeMethod(spec, merge)


def main() -> None:
    """Register the method and run ``mergekit-yaml`` with this command line."""
    register()
    from mergekit.scripts.run_yaml import main as run

    run()


if __name__ == "__main__":
    main()
