"""(FG)²U step by step: a hypergradient at any time, φ that changes on the way, save and resume."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from sparing.errors import UserError, require
from sparing.hypergrad.apply import assemble_result, bottleneck, emit_warnings
from sparing.hypergrad.estimate import Result
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.forward_mode.sampled import draw_directions
from sparing.hypergrad.forward_mode.sweep import Sweep, reverse_tail
from sparing.hypergrad.forward_mode.tangents import growth, pushforward, row_norms, start
from sparing.hypergrad.inner.checks import check_nesting, check_problem, check_tree, refuse_inference_mode
from sparing.hypergrad.inner.repeatability import FirstPass
from sparing.hypergrad.problem import Bilevel
from sparing.hypergrad.settings import require_count
from sparing.hypergrad.trees import Tree, leaves, rebuild, row_products, unravel, zeros_like
from sparing.seeds import number


class Stream:
    """The inner run and its tangents, a step at a time.

    One run gives hypergradients of every depth, which no reverse method can. Steps may go beyond ``problem.steps``;
    ``turn`` changes φ during the run and, by default, carries the tangents into the next window: with a slowly moving φ
    they are slightly stale, and without them each window has only its own gradient.

    Source: Shen et al. 2024, eq. 8; Silver et al. 2022 (DODGE) for tangents carried while φ moves.

    Example:
        >>> from sparing import hypergrad as hg
        >>> problem = hg.Bilevel(
        ...     inner=lambda theta, phi, batch: ((theta - phi) ** 2).sum() / 2,
        ...     outer=lambda theta, phi: theta.sum(),
        ...     init=torch.zeros(2), optimizer=hg.SGD(lr=0.5), steps=2,
        ... )
        >>> stream = hg.Stream(problem, torch.ones(2), hg.ForwardGradient(directions=2, law=hg.Orthonormal()))
        >>> for _ in range(2):
        ...     stream.step()
        ...     print([round(float(slope), 4) for slope in stream.peek().grad])
        [0.5, 0.5]
        [0.75, 0.75]
    """

    def __init__(self, problem: Bilevel, phi: Tree, method: ForwardGradient, *, seed: int = 0, late: int = 0) -> None:
        """Take the state before the first step.

        Args:
            problem: The two-level problem.
            phi: Tree of floating tensors.
            method: Directions, law and width; guides, tail, control, spread and chunk belong to a whole run.
            seed: Seed of everything random.
            late: Steps without tangents at the start (count): drops the oldest part of the derivative, biased.

        Raises:
            UserError: If the method needs a whole run, or something does not fit.
        """
        if method.guides or method.tail or method.control is not None or method.spread is not None:
            raise UserError(
                "method", got=str(method), why="guides, tail, control and spread need a whole run",
                do="pass ForwardGradient(directions=…, law=…, width=…)",
            )  # fmt: skip
        if method.chunk is not None and method.chunk < method.directions:
            raise UserError(
                "chunk", got=f"{method.chunk} of {method.directions} directions", do="pass fewer directions, or width=",
                why="the run is not repeated, so all tangents are held; width bounds the activations of a step",
            )  # fmt: skip
        require_count("late", late, "steps are counted", least=0, do="pass late >= 0")
        self.problem, self.method, self.seed, self.late = problem, method, seed, int(late)
        self.steps = 0  # taken so far
        self.phi = check_tree("phi", phi)
        self._psi, _ = bottleneck(problem, self.phi, seed)
        self._unroll = check_problem(problem, self._psi, seed)
        self._draw = draw_directions(method.law, method.directions, self._psi, number(seed, "directions"))
        self._state, self._tangents = start(self._unroll, self._psi, self._rows())
        self._sizes: list[Tensor] = []
        # the part that comes through θ₀ is dropped with that of the first steps
        if late:
            self._tangents = zeros_like(self._tangents)

    def _rows(self) -> Tree:
        return unravel(self._draw.rows(range(self.method.directions)), self._psi)

    def step(self) -> None:
        """Take one inner step, for the run and for all tangents.

        Raises:
            UserError: If there is no batch left, or a schedule does not fit this step.
        """
        refuse_inference_mode("Stream.step")
        if self.steps >= self.problem.steps:
            self._check_beyond()
        if self.steps < self.late:
            self._state = self._unroll.run(self._psi, state=self._state, first=self.steps, last=self.steps + 1)
        else:
            rows, width = self._rows(), self.method.width or self.method.directions
            self._state, self._tangents = pushforward(
                self._unroll, self.steps, self._state, self._tangents, self._psi, rows, width
            )
            self._sizes.append(row_norms(self._tangents.theta))
        self.steps += 1

    def _check_beyond(self) -> None:
        """Refuse a step after those that were checked at the start, if it has no batch or no setting of its own."""
        batches = self.problem.batches
        if batches is not None and not callable(batches) and self.steps >= len(batches):
            raise UserError(
                "batches", got=f"a list of {len(batches)} for step {self.steps + 1}", why="each step takes its own",
                do="pass a longer list, or a function of the step",
            )  # fmt: skip
        check_nesting(self.problem.optimizer, self._psi, self._unroll.theta, [self.steps])

    def peek(self) -> Result:
        """The hypergradient of the run so far; the run is not touched.

        Returns:
            As of ``hypergradient`` at T = steps.
        """
        begin = time.perf_counter()
        back, known, finish = reverse_tail(self._unroll, self._state, self._psi, self.phi, self.steps, self.steps)
        weights = row_products(leaves(self._tangents), back)
        grown = growth(self._sizes, row_norms(leaves(self._rows())))
        swept = Sweep(weights=weights, known=known, finish=finish, growth=grown)
        found = self.method.assembled(self._unroll, self._psi, self._draw, swept, weights)
        result = assemble_result(self.problem, self._unroll, self.phi, self.method, found, begin, self.steps)
        return emit_warnings(result)

    def turn(self, phi: Tree, *, carry: bool = True) -> None:
        """Continue with another φ.

        Args:
            phi: As before, with other values.
            carry: Whether the tangents continue; otherwise they start again at zero and cover this window alone.

        Raises:
            UserError: If nesting, shapes or dtypes differ.
        """
        fresh = check_tree("phi", phi)
        # places of leaves, and not the kinds of their containers: an OrderedDict may follow a dict
        places = [[path for path, _ in tree_flatten_with_path(tree)[0]] for tree in (fresh, self.phi)]
        if places[0] != places[1]:
            raise UserError(
                "phi", got="another nesting or order of its keys", why="the tangents belong to the leaves in order",
                do="build it as {name: ... for name in phi}, from the first φ",
            )  # fmt: skip
        if [(x.shape, x.dtype) for x in leaves(fresh)] != [(x.shape, x.dtype) for x in leaves(self.phi)]:
            raise UserError("phi", got="other shapes or dtypes", why="the directions have the old ones", do="keep them")
        self.phi = fresh
        self._psi, _ = bottleneck(self.problem, fresh, self.seed)
        # a run at another φ has other losses: it is compared from here on with itself
        self._unroll = replace(self._unroll, first_pass=FirstPass())
        if not carry:
            self._tangents = zeros_like(self._tangents)

    @property
    def _mark(self) -> int:
        """Stands for all that the tangents belong to."""
        return number(self.seed, "stream", int(self.method.directions), str(self.method.law), self.late)

    def _parts(self) -> dict[str, Tensor]:
        """State, tangents and φ by name."""
        parts = {"state": leaves(self._state), "tangents": leaves(self._tangents), "phi": leaves(self.phi)}
        return {f"{name}.{k}": part for name, listed in parts.items() for k, part in enumerate(listed)}

    def state_dict(self) -> dict[str, Tensor]:
        """State, tangents and counters as tensors by name, ready for safetensors; directions come from seeds again.

        Returns:
            Copies.
        """
        return {name: part.clone() for name, part in self._parts().items()} | {
            "steps": torch.tensor(self.steps),
            "sizes": torch.stack(self._sizes) if self._sizes else torch.zeros(0, dtype=torch.float64),
            "seed": torch.tensor(self._mark),
        }

    def load_state_dict(self, held: Mapping[str, Tensor]) -> None:
        """Continue from where a state dict was taken, to the same bits.

        Args:
            held: State of a stream over the same problem, method and seed.

        Raises:
            UserError: If it belongs to another.
        """
        own = self._parts()
        leafy = {name for name in held if name.startswith(("state.", "tangents.", "phi."))}
        alone = sorted({*own, "steps", "sizes", "seed"} - set(held) | leafy - set(own))
        do = "make the stream with the problem it was saved with"
        require(not alone, "state", f"{', '.join(alone)} on one side alone", "it is that of another problem", do)
        for name, part in own.items():
            one, other = (f"{leaf.dtype} of shape {tuple(leaf.shape)}" for leaf in (held[name], part))
            require(one == other, f"state {name!r}", one, f"this run has {other}", do)
        if int(held["seed"]) != self._mark:
            raise UserError(
                "state", got="another seed, law or number of directions", why="the tangents belong to those directions",
                do="make the stream with the same seed and method",
            )  # fmt: skip

        def like(name: str, parts: list[Tensor]) -> list[Tensor]:
            return [held[f"{name}.{k}"].to(part).clone() for k, part in enumerate(parts)]

        self.turn(rebuild(self.phi, like("phi", leaves(self.phi))))
        self._state = rebuild(self._state, like("state", leaves(self._state)))
        self._tangents = rebuild(self._tangents, like("tangents", leaves(self._tangents)))
        self.steps, self._sizes = int(held["steps"]), list(held["sizes"].to(leaves(self._state)[0].device))
