"""Mask rules: how scores become codes, codes factors on the frozen weights, and what gradient a score gets.

    codes  = rule.codes(scores)                       one small integer a weight: what a ticket stores
    weight = drawn * factors[codes]
    dL/dscore := dL/dfactor * slope(score)            the step from score to code counts as `soft(score)`

A rule is one class; its fields are its options, which the model's configuration has under the same names.
Everything else (layers, tickets, coding, algebra, figures) works with codes and factors, and knows no rule.
`docs/rules.md` shows how to add one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..model.configuration_supermask_gpt2 import RULE_OPTIONS, SETTLERS, SupermaskGPT2Config
from ..model.random_weights import TensorSpec, draw
from .selection import keep_by_chance, keep_in_groups, keep_largest, keep_largest_of_all, kept_count


@dataclass(frozen=True)
class Place:
    """The tensor whose scores a rule is asked about."""

    tensor: TensorSpec
    inputs: int  # the dimension of the matrix that runs over inputs
    training: bool = False

    @property
    def fan_in(self) -> int:
        return self.tensor.shape[self.inputs]


@dataclass(frozen=True)
class Rule(ABC):
    """What is common: scores are ranked by magnitude, and their gradient has the sign of the score."""

    factors: ClassVar[Sequence[float]] = (0.0, 1.0)
    joint: ClassVar[bool] = False  # whether all tensors of a model are ranked together

    def check(self) -> None:  # noqa: B027  many rules have nothing to check
        """Raise ValueError, naming the value and the cure, for an option that cannot be."""

    def first_scores(self, place: Place, size: tuple[int, ...]) -> np.ndarray:
        """Where learning starts: U[-1, 1] / sqrt(fan in), Kaiming's bound with a = sqrt 5."""
        bound = 1 / math.sqrt(place.fan_in)
        return draw(place.tensor.seed, place.tensor.name + ".scores", size, "uniform", bound)

    @abstractmethod
    def codes(self, scores: Tensor, place: Place) -> Tensor:
        """One code a score: booleans, or integers in uint8."""

    def codes_of_all(self, scores: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
        """The codes of several tensors: each by itself, unless the rule is joint."""
        return [self.codes(one, place) for one, place in zip(scores, places, strict=True)]

    def soft(self, scores: Tensor) -> Tensor:
        """What the factor is taken for, where it is differentiated."""
        return scores.abs()

    def slope(self, scores: Tensor) -> Tensor | None:
        """The derivative of `soft`; None is 1."""
        return scores.sign()


@dataclass(frozen=True)
class Through(Rule):
    """What is common to rules in which a larger score means a larger factor: the gradient passes through."""

    def soft(self, scores: Tensor) -> Tensor:
        return scores

    def slope(self, scores: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class EdgePopup(Rule):
    """Keep the weights whose scores are the largest in magnitude (Ramanujan et al., 2020)."""

    density: float = 0.3

    def check(self) -> None:
        check_density("density", self.density)

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        return keep_largest(scores, kept_count(self.density, scores.numel()), magnitude=True)


@dataclass(frozen=True)
class Global(EdgePopup):
    """Edge-popup with one threshold over all tensors; ramp the density down, or layers may empty."""

    joint = True

    def codes_of_all(self, scores: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
        count = kept_count(self.density, sum(one.numel() for one in scores))
        return keep_largest_of_all(scores, count, magnitude=True)


@dataclass(frozen=True)
class Sign(Through):
    """Keep every weight, and learn its sign."""

    factors = (-1.0, 1.0)

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        return scores >= 0


@dataclass(frozen=True)
class Signed(Through):
    """Edge-popup that also learns the sign of what it keeps (Koster et al., 2022)."""

    density: float = 0.6
    factors = (-1.0, 0.0, 1.0)

    check = EdgePopup.check

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        kept = EdgePopup.codes(self, scores, place)  # type: ignore[arg-type]
        return 1 + kept * (2 * (scores >= 0).to(torch.uint8) - 1)  # bytes wrap: 1 + 255 is code 0


@dataclass(frozen=True)
class Multicoat(Rule):
    """A sum of nested masks: a weight counts as often as it is among the largest (Okoshi et al., 2022)."""

    densities: Sequence[float] = (0.3, 0.0788, 0.0315)

    @property
    def factors(self) -> Sequence[float]:  # type: ignore[override]
        return tuple(float(coats) for coats in range(len(self.densities) + 1))

    def check(self) -> None:
        for density in self.densities:
            check_density("densities", density)
        if not self.densities or list(self.densities) != sorted(set(self.densities), reverse=True):
            raise ValueError(f"densities {list(self.densities)} do not fall: give the largest first")
        if len(self.densities) > 15:
            raise ValueError(f"densities: {len(self.densities)} coats are too many; a code has four bits")

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        size = scores.numel()
        coats = [keep_largest(scores, kept_count(one, size), magnitude=True) for one in self.densities]
        return sum((coat.to(torch.uint8) for coat in coats[1:]), coats[0].to(torch.uint8))


@dataclass(frozen=True)
class Multibit(Through):
    """The factor is the score itself, rounded to a few levels from -1 to 1 (as TicketLLM's, 2025)."""

    mask_bits: int = 2

    @property
    def factors(self) -> Sequence[float]:  # type: ignore[override]
        levels = 2**self.mask_bits  # of 2 bits: -3/4, -1/4, 1/4, 3/4
        return tuple((2 * level + 1) / levels - 1 for level in range(levels))

    def check(self) -> None:
        if self.mask_bits not in (2, 3, 4):
            raise ValueError(f"mask_bits {self.mask_bits} is not 2, 3 or 4")

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        # The first scores fill -1 .. 1 in units of their bound, so that all levels are in use.
        half = 2 ** (self.mask_bits - 1)
        levels = (scores * (half * math.sqrt(place.fan_in)) + half).floor()
        return levels.clamp(0, 2 * half - 1).to(torch.uint8)


@dataclass(frozen=True)
class Threshold(Through):
    """Keep what scores above a fixed threshold; the density is what comes of it (piggyback, Mallya 2018)."""

    threshold: float = 5e-3

    def first_scores(self, place: Place, size: tuple[int, ...]) -> np.ndarray:
        return np.full(size, 1e-2, np.float32)

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        return scores > self.threshold


@dataclass(frozen=True)
class Bernoulli(Rule):
    """Keep by chance while training, with probability sigmoid(score); then what is likelier (Zhou, 2019).

    The chance follows from the seed and the scores: the same scores, the same mask. So a run can be repeated
    and resumed, all processes agree, and a backward that computes a block again finds the same weights.
    """

    def soft(self, scores: Tensor) -> Tensor:
        return scores.sigmoid()

    def slope(self, scores: Tensor) -> Tensor:
        share = scores.sigmoid()
        return share * (1 - share)

    def first_scores(self, place: Place, size: tuple[int, ...]) -> np.ndarray:
        return np.zeros(size, np.float32)

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        if not place.training:
            return scores > 0
        return keep_by_chance(scores, place.tensor.seed, place.tensor.name)


@dataclass(frozen=True)
class NofM(Rule):
    """Of every m weights along the inputs keep the n whose scores are the largest in magnitude."""

    n_of_m: Sequence[int] = (2, 4)

    def check(self) -> None:
        if len(self.n_of_m) != 2 or not 0 < self.n_of_m[0] < self.n_of_m[1] <= 32:
            raise ValueError(f"n_of_m {list(self.n_of_m)} is not two numbers n < m, m at most 32, as [2, 4]")

    def codes(self, scores: Tensor, place: Place) -> Tensor:
        few, many = self.n_of_m
        if scores.dim() != 2 or place.fan_in % many:
            raise ValueError(
                f"{place.tensor.name} has {place.fan_in} inputs, all of them searched by groups of {many}: "
                "take a width that is a multiple, and search=1"
            )
        return keep_in_groups(scores, few, many, place.inputs)


RAMPED = ("density", "threshold")  # options that a loop may change from step to step


def check_density(name: str, density: float) -> None:
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
}


def settle(config: SupermaskGPT2Config) -> None:
    """Give the options of the rule that were left out their defaults, and refuse those of other rules."""
    if config.rule not in RULES:
        raise ValueError(f"rule {config.rule!r} is not one of {', '.join(map(repr, RULES))}")
    own: dict[str, Any] = {field.name: field.default for field in fields(RULES[config.rule])}
    for name in RULE_OPTIONS:
        value = getattr(config, name)
        if value is not None and name not in own:
            has = f"has {', '.join(own)}" if own else "has none: leave it out"
            raise ValueError(
                f"{name} {value} is no option of rule {config.rule!r}, which {has}; leave it out"
            )
        if value is None and name in own:
            setattr(config, name, list(own[name]) if isinstance(own[name], tuple) else own[name])
    rule = RULES[config.rule](**dict(config.rule_options))
    rule.check()
    config.factors = list(rule.factors)
    if config.search < 1 and config.frozen_density is None:
        some = config.density or (config.densities or [0.5 if 0.0 in config.factors else 1.0])[0]
        config.frozen_density = some


SETTLERS.append(settle)
