"""Training steps without a mask: every factor is the surrogate of its score.

    factor = surrogate(score) * size / rms(surrogate of all scores)      while the model trains (trellis: or of a row)
    factor = factors[rule.codes(scores)]                                 in evaluation, and when the steps are over

A mask that changes at every step is noise for the scores. In relaxed steps they learn without that noise, and without
the time that a search takes. The steps that follow adapt them to the mask. A ticket only ever holds codes of the rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .rules import Rule, ScoreContext


@dataclass(frozen=True)
class Relaxed(Rule):
    """A rule whose training steps use no mask. Evaluation and saving use the rule itself.

    Args:
        rule ([`Rule`]):
            The rule that is relaxed.
    """

    rule: Rule

    @property
    def factors(self) -> Sequence[float]:  # type: ignore[override]
        return self.rule.factors

    @property
    def joint(self) -> bool:  # type: ignore[override]
        return self.rule.joint

    @property
    def state_bits(self) -> int | None:  # type: ignore[override]
        return self.rule.state_bits

    def codes(self, scores: Tensor, context: ScoreContext) -> Tensor:
        """Return the codes of the rule, but in a training step the factors themselves, as floating-point numbers."""
        if not context.training:
            return self.rule.codes(scores, context)
        surrogate = self.rule.surrogate(scores)
        return surrogate * (self.rule.typical_size / self.rule.size_of(surrogate, context))

    def codes_of_all(self, scores: Sequence[Tensor], contexts: Sequence[ScoreContext]) -> list[Tensor]:
        """Return the same for several tensors. A joint rule ranks them together in evaluation only."""
        if any(context.training for context in contexts):
            return super().codes_of_all(scores, contexts)
        return self.rule.codes_of_all(scores, contexts)

    def surrogate(self, scores: Tensor) -> Tensor:
        return self.rule.surrogate(scores)

    def surrogate_grad(self, scores: Tensor) -> Tensor | None:
        return self.rule.surrogate_grad(scores)
