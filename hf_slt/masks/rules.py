"""Mask rules: how scores become codes, how codes become factors of the weights, and what gradient a score gets.

    codes  = rule.codes(scores)                           one small integer per weight: what a ticket stores
    weight = drawn * factors[codes]                       of a trellis: table[states(codes)]
    dL/dscore := dL/dfactor * surrogate_grad(score)       the backward pass uses `surrogate(score)` as the factor

A rule is one dataclass; its fields are its options. Everything else (masked parameters, tickets, coding,
algebra, figures) works with codes and factors and knows no rule by name. `docs/rules.md` shows how to add one.
"""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..weights.codes import planes
from ..weights.random_weights import TensorSpec, draw
from ..weights.trellis import BRANCHES, LARGEST_STATE_BITS
from .selection import keep_by_chance, keep_in_groups, keep_largest, keep_largest_of_all, kept_count
from .trellis import path_of_targets


def rule_option(default: Any, text: str) -> Any:
    """Declare an option of a rule, with the help that command lines and pages show.

    Args:
        default:
            Value of the option if it is left out.
        text (`str`):
            Help text.

    Returns:
        A field of a dataclass.
    """
    return field(default=default, metadata={"help": text})


def root_mean_square(values: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Return the root mean square of all values, or along some axes, which then have size 1.

    Args:
        values (`Tensor`):
            Any numbers.
        axes (`Sequence[int]`, *optional*):
            Axes to take the mean over. Default: all.

    Returns:
        `Tensor`: at least 1e-30, so that values can be divided by it.
    """
    exact = torch.float64 if values.device.type == "cpu" else torch.float32  # the same on all CPUs
    squares = values.to(exact).square()
    mean = squares.mean() if axes is None else squares.mean(tuple(axes), keepdim=True)
    return mean.sqrt().clamp_min(1e-30).to(values.dtype)


@dataclass(frozen=True)
class ScoreContext:
    """The tensor whose scores a rule turns into codes.

    Args:
        tensor ([`TensorSpec`]):
            The frozen tensor that the scores belong to.
        training (`bool`, defaults to `False`):
            Whether the codes are for a training step. Rules that sample need to know.
    """

    tensor: TensorSpec
    training: bool = False


@dataclass(frozen=True)
class Rule(ABC):
    """Base class of all rules. By default scores are ranked by magnitude.

    The gradient of a score then has the sign of the score.
    """

    factors: ClassVar[Sequence[float]] = (0.0, 1.0)
    joint: ClassVar[bool] = False  # whether all tensors of a model are ranked together
    state_bits: ClassVar[int | None] = None  # if codes are a path through a trellis: bits of a state

    @property
    def typical_size(self) -> float:
        """Root mean square of the factors of a mask. Relaxed steps give their factors this size."""
        return math.sqrt(sum(factor**2 for factor in self.factors) / len(self.factors))

    def size_of(self, values: Tensor, context: ScoreContext) -> Tensor:
        """Return the unit of the values of one tensor: their root mean square.

        Args:
            values (`Tensor`):
                One number per weight.
            context ([`ScoreContext`]):
                The tensor that they belong to.

        Returns:
            `Tensor`: one number, or numbers that can be broadcast to the values.
        """
        return root_mean_square(values)

    def check(self) -> None:  # noqa: B027  many rules have nothing to check
        """Raise `ValueError` if an option has an impossible value. The message names it and says what to do."""

    def first_scores(self, context: ScoreContext, size: tuple[int, ...]) -> np.ndarray:
        """Return the scores that training starts from: U[-1, 1] / sqrt(fan in), Kaiming's bound with a = sqrt 5.

        Args:
            context ([`ScoreContext`]):
                The tensor that the scores are for.
            size (`tuple[int, ...]`):
                Shape of the scores.

        Returns:
            `np.ndarray`: the scores in float32.
        """
        tensor = context.tensor
        return draw(tensor.seed, tensor.name + ".scores", size, "uniform", 1 / math.sqrt(tensor.fan_in))

    @abstractmethod
    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        """Turn scores into codes.

        Args:
            scores (`Tensor`):
                Scores of one tensor.
            context ([`ScoreContext`]):
                The tensor that they belong to, and whether this is a training step.

        Returns:
            `Tensor`: one code per score: booleans, or integers in uint8. Code i stands for `factors[i]`.
        """

    def codes_of_all(self, scores: Sequence[Tensor], contexts: Sequence[ScoreContext]) -> list[Tensor]:
        """Turn the scores of several tensors into codes: each tensor by itself, unless the rule is joint.

        Args:
            scores (`Sequence[Tensor]`):
                Scores of each tensor.
            contexts (`Sequence[ScoreContext]`):
                The tensors that they belong to.

        Returns:
            `list[Tensor]`: the codes of each tensor.
        """
        return [self.codes(one, context) for one, context in zip(scores, contexts, strict=True)]

    def surrogate(self, scores: Tensor) -> Tensor:
        """Compute the differentiable function of the scores that the backward pass uses as the factor.

        Args:
            scores (`Tensor`):
                Scores of one tensor.

        Returns:
            `Tensor`: the function's values. Its derivative is `surrogate_grad`.
        """
        return scores.abs()

    def surrogate_grad(self, scores: Tensor) -> Tensor | None:
        """Compute the derivative of `surrogate`.

        Args:
            scores (`Tensor`):
                Scores of one tensor.

        Returns:
            `Tensor | None`: one number per score, which the gradient is multiplied by. None stands for 1 everywhere.
        """
        return scores.sign()


@dataclass(frozen=True)
class StraightThroughRule(Rule):
    """Base class of rules in which a larger score means a larger factor: the gradient passes unchanged."""

    def surrogate(self, scores: Tensor) -> Tensor:
        """Return the scores."""
        return scores

    def surrogate_grad(self, scores: Tensor) -> Tensor | None:
        """Return None, which stands for a derivative of 1."""
        return None


@dataclass(frozen=True)
class EdgePopup(Rule):
    """Keep the weights whose scores are the largest in magnitude (Ramanujan et al., 2020)."""

    density: float | int = rule_option(0.3, "Fraction kept, in (0, 1].")

    @property
    def typical_size(self) -> float:
        return math.sqrt(self.density)

    def check(self) -> None:
        check_density("density", self.density)

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        return keep_largest(scores, kept_count(self.density, scores.numel()), magnitude=True)


@dataclass(frozen=True)
class Global(EdgePopup):
    """Edge-popup with one threshold for all tensors. Lower the density step by step, or layers may become empty."""

    joint = True

    def codes_of_all(self, scores: Sequence[Tensor], contexts: Sequence[ScoreContext]) -> list[Tensor]:
        count = kept_count(self.density, sum(one.numel() for one in scores))
        return keep_largest_of_all(scores, count, magnitude=True)


@dataclass(frozen=True)
class Sign(StraightThroughRule):
    """Keep every weight, and learn its sign."""

    factors = (-1.0, 1.0)

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        return scores >= 0


@dataclass(frozen=True)
class Signed(StraightThroughRule):
    """Edge-popup that also learns the sign of each weight it keeps (Koster et al., 2022)."""

    density: float | int = rule_option(0.6, "Fraction kept, in (0, 1].")
    factors = (-1.0, 0.0, 1.0)

    typical_size = EdgePopup.typical_size
    check = EdgePopup.check

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        kept = EdgePopup.codes(self, scores, context)  # type: ignore[arg-type]
        return 1 + kept * (2 * (scores >= 0).to(torch.uint8) - 1)  # bytes wrap: 1 + 255 is code 0


@dataclass(frozen=True)
class Multicoat(Rule):
    """A sum of nested masks: the factor is the number of masks that keep the weight (Okoshi et al., 2022)."""

    densities: Sequence[float] = rule_option(
        (0.3, 0.0788, 0.0315), "Densities of the nested masks, the largest first."
    )

    @property
    def factors(self) -> Sequence[float]:  # type: ignore[override]
        return tuple(float(coats) for coats in range(len(self.densities) + 1))

    @property
    def typical_size(self) -> float:
        # A weight under k coats has the square k**2 = 1 + 3 + ... + (2k - 1).
        return math.sqrt(sum((2 * coat + 1) * density for coat, density in enumerate(self.densities)))

    def check(self) -> None:
        for density in self.densities:
            check_density("densities", density)
        if not self.densities or list(self.densities) != sorted(set(self.densities), reverse=True):
            raise ValueError(f"densities {list(self.densities)} do not fall: give the largest first")
        if len(self.densities) > 15:
            raise ValueError(f"densities: {len(self.densities)} coats are too many; a code has four bits")

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        size = scores.numel()
        coats = [keep_largest(scores, kept_count(one, size), magnitude=True) for one in self.densities]
        return sum((coat.to(torch.uint8) for coat in coats[1:]), coats[0].to(torch.uint8))


@dataclass(frozen=True)
class Multibit(StraightThroughRule):
    """The factor is the score itself, rounded to a few levels from -1 to 1 (as TicketLLM's, 2025)."""

    mask_bits: int = rule_option(2, "Bits per code: 2, 3 or 4.")

    @property
    def factors(self) -> Sequence[float]:  # type: ignore[override]
        levels = 2**self.mask_bits  # of 2 bits: -3/4, -1/4, 1/4, 3/4
        return tuple((2 * level + 1) / levels - 1 for level in range(levels))

    def check(self) -> None:
        if self.mask_bits not in (2, 3, 4):
            raise ValueError(f"mask_bits {self.mask_bits} is not 2, 3 or 4")

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        # In units of their bound, the first scores fill -1 .. 1: all levels are in use.
        half = 2 ** (self.mask_bits - 1)
        levels = (scores * (half * math.sqrt(context.tensor.fan_in)) + half).floor()
        return levels.clamp(0, 2 * half - 1).to(torch.uint8)


@dataclass(frozen=True)
class Threshold(StraightThroughRule):
    """Keep weights whose score is above a fixed threshold; the density is not fixed (piggyback, Mallya 2018)."""

    threshold: float = rule_option(5e-3, "Keep weights whose score is larger than this.")

    def first_scores(self, context: ScoreContext, size: tuple[int, ...]) -> np.ndarray:
        return np.full(size, 1e-2, np.float32)

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        return scores > self.threshold


@dataclass(frozen=True)
class Bernoulli(Rule):
    """Keep each weight with probability sigmoid(score); after training, if the score is positive (Zhou, 2019).

    Seed and scores determine the random choice: the same scores give the same mask. So a run can be repeated
    and resumed, all processes agree, and a backward that computes a block again finds the same weights.
    """

    def surrogate(self, scores: Tensor) -> Tensor:
        return scores.sigmoid()

    def surrogate_grad(self, scores: Tensor) -> Tensor:
        share = scores.sigmoid()
        return share * (1 - share)

    def first_scores(self, context: ScoreContext, size: tuple[int, ...]) -> np.ndarray:
        return np.zeros(size, np.float32)

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        if not context.training:
            return scores > 0
        return keep_by_chance(scores, context.tensor.seed, context.tensor.name)


@dataclass(frozen=True)
class NofM(Rule):
    """Of every m weights along the inputs keep the n whose scores are the largest in magnitude."""

    n_of_m: Sequence[int] = rule_option((2, 4), "Keep n of every m inputs.")

    @property
    def typical_size(self) -> float:
        return math.sqrt(self.n_of_m[0] / self.n_of_m[1])

    def check(self) -> None:
        if len(self.n_of_m) != 2 or not 0 < self.n_of_m[0] < self.n_of_m[1] <= 32:
            raise ValueError(f"n_of_m {list(self.n_of_m)} is not two numbers n < m, m at most 32, as [2, 4]")

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        few, many = self.n_of_m
        if scores.dim() != 2 or len(context.tensor.input_axes) != 1 or context.tensor.fan_in % many:
            raise ValueError(
                f"{context.tensor.name} has {context.tensor.fan_in} inputs, all of them searched by groups of {many}: "
                "take a width that is a multiple, and search=1"
            )
        return keep_in_groups(scores, few, many, context.tensor.input_axes[0])


@dataclass(frozen=True)
class Trellis(StraightThroughRule):
    """A path through drawn numbers, the one nearest to the scores: a random code, searched by Viterbi's algorithm.

    A score is what its weight should be, but for a factor: the scores of a tensor, or of each of its rows, are taken
    in units of their root mean square, the table in units of its own.
    """

    branches: int = rule_option(
        4, "Codes per weight, 2 to 16: its base-2 logarithm is the bits per weight, 1 to 4."
    )
    states: int = rule_option(
        256,
        "Drawn numbers per tensor: a power of branches, or any power of two if branches is one; the time of a search"
        " grows with it.",
    )
    unit: str = rule_option(
        "tensor",
        "What scores are measured by before they are compared with drawn numbers: the root mean square of the whole"
        " tensor or of each row, which goes well with scales: row.",
    )

    @property
    def factors(self) -> Sequence[float]:  # type: ignore[override]
        return tuple(float(number) for number in range(1, self.branches + 1))  # nothing but numbers of codes

    @property
    def state_bits(self) -> int:  # type: ignore[override]
        if self.branches.bit_count() == 1:
            return self.states.bit_length() - 1
        return planes(self.branches) * round(math.log(self.states, self.branches))

    @property
    def typical_size(self) -> float:
        return 1.0  # that of the table

    def check(self) -> None:
        if self.branches not in BRANCHES:
            raise ValueError(
                f"branches {self.branches} of rule 'trellis' is not from {BRANCHES[0]} to {BRANCHES[-1]}"
            )
        base = 2 if self.branches.bit_count() == 1 else self.branches
        powers = [base**power for power in range(2, LARGEST_STATE_BITS // planes(base) + 1)]
        powers = [one for one in powers if one > self.branches]
        if self.states not in powers:
            shown = f"a power of {base} from {powers[0]} to {powers[-1]}"
            raise ValueError(f"states {self.states} is not {shown}, as branches {self.branches} needs it")
        if self.unit not in ("tensor", "row"):
            raise ValueError(f"unit {self.unit!r} of rule 'trellis' is not tensor or row")

    def first_scores(self, context: ScoreContext, size: tuple[int, ...]) -> np.ndarray:
        tensor = context.tensor
        return draw(tensor.seed, tensor.name + ".scores", size, "normal", 1 / math.sqrt(tensor.fan_in))

    def size_of(self, values: Tensor, context: ScoreContext) -> Tensor:
        axes = context.tensor.input_axes if self.unit == "row" else None
        return root_mean_square(values, axes)

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        return path_of_targets(scores / self.size_of(scores, context), context.tensor)


RAMPED = ("density", "threshold")  # options that a loop may change from step to step


def check_density(name: str, density: float) -> None:
    """Check that a density is valid.

    Args:
        name (`str`):
            Name of the option, for the message.
        density (`float`):
            The value.

    Raises:
        `ValueError`: if it is not in (0, 1].
    """
    if not 0 < density <= 1:
        raise ValueError(f"{name} {density} is not in (0, 1]: it is the fraction of weights kept")


RULES: dict[str, type[Rule]] = {
    "edge_popup": EdgePopup,
    "sign": Sign,
    "signed": Signed,
    "multicoat": Multicoat,
    "multibit": Multibit,
    "threshold": Threshold,
    "bernoulli": Bernoulli,
    "global": Global,
    "n_m": NofM,
    "trellis": Trellis,
}


def rule_option_names() -> list[str]:
    """Return the names of the options of all known rules, each once.

    Returns:
        `list[str]`: the names, such as `density`.
    """
    return list(dict.fromkeys(one.name for rule in RULES.values() for one in fields(rule)))


def make_rule(name: str, options: Mapping[str, Any]) -> Rule:
    """Build a rule from its name and its options.

    Args:
        name (`str`):
            A key of `RULES`.
        options (`Mapping[str, Any]`):
            Options of the rule. Those that are left out have the rule's defaults.

    Returns:
        [`Rule`]: the rule, its options checked.

    Raises:
        `ValueError`: for an unknown rule, an option of another rule, or an impossible value.

    Example:

    >>> make_rule("edge_popup", {"density": 0.5})
    EdgePopup(density=0.5)
    """
    if name not in RULES:
        near = difflib.get_close_matches(str(name), RULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"rule {name!r} is not one of {', '.join(map(repr, RULES))}{hint}")
    defaults = {one.name: one.default for one in fields(RULES[name])}
    for option, value in options.items():
        if option not in defaults:
            has = f"has {', '.join(defaults)}" if defaults else "has none"
            raise ValueError(f"{option} {value} is no option of rule {name!r}, which {has}; leave it out")
        words = isinstance(defaults[option], str)
        if isinstance(value, bool) or isinstance(value, str) != words:
            raise ValueError(f"{option} {value!r} of rule {name!r} is not a {'word' if words else 'number'}")
    plain = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    rule = RULES[name](**plain)
    rule.check()
    return rule


def rule_options(rule: Rule) -> dict[str, Any]:
    """Return the options of a rule as JSON can hold them.

    Args:
        rule ([`Rule`]):
            A rule.

    Returns:
        `dict[str, Any]`: the options by name, tuples as lists.

    Example:

    >>> rule_options(NofM())
    {'n_of_m': [2, 4]}
    """
    values = {one.name: getattr(rule, one.name) for one in fields(rule)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
