"""Training steps that use the mask of an earlier step: a search that takes long is not made at every step.

    codes = rule.codes(scores at the last step that made a mask)      while the model trains
    codes = rule.codes(scores)                                        in evaluation, and in the ticket

Scores learn at every step, and so does everything else. The training loop decides when masks are made again: it gives
the model a new, empty `Held`, which the next forward fills.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .rules import Rule, ScoreContext


@dataclass(frozen=True)
class Held(Rule):
    """A rule whose codes are computed in the first training step that needs them, and then used again.

    Args:
        rule ([`Rule`]):
            The rule.
        held (`dict[str, Tensor]`, *optional*):
            Codes by name of their tensor. Codes that are missing are computed by the next training step.
    """

    rule: Rule
    held: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

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
        """Return the codes of the rule; in a training step, those that are held."""
        return self.codes_of_all([scores], [context])[0]

    def codes_of_all(self, scores: Sequence[Tensor], contexts: Sequence[ScoreContext]) -> list[Tensor]:
        """Return the same for several tensors."""
        if not all(context.training for context in contexts):
            return self.rule.codes_of_all(scores, contexts)
        names = [context.tensor.name for context in contexts]
        if not all(name in self.held for name in names):
            self.held.update(zip(names, self.rule.codes_of_all(scores, contexts), strict=True))
        return [self.held[name].to(one.device) for name, one in zip(names, scores, strict=True)]

    def surrogate(self, scores: Tensor) -> Tensor:
        return self.rule.surrogate(scores)

    def surrogate_grad(self, scores: Tensor) -> Tensor | None:
        return self.rule.surrogate_grad(scores)
