"""The loss of a language model, computed in pieces that stay in a core's cache.

    loss     = -mean over tokens of log softmax(logits)[label]          # transformers' ForCausalLMLoss
    gradient = softmax(logits) - (1 at the label), of each token

torch's cross entropy keeps the log-probabilities for its backward, which makes two more tensors of that size.
With a vocabulary of 50257 tokens, allocating so much memory at every step costs more than the arithmetic. Here
only the logits are kept, and the probabilities of a few tokens at a time are computed twice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import SLTError
from ..masks.selection import piece_size

_FEW = 16  # below 16 pieces the allocator reuses memory, so pieces gain nothing


def causal_lm_loss(logits: Tensor, labels: Tensor | None, vocab_size: int, **kwargs) -> Tensor:
    """Return the same as `ForCausalLMLoss` of transformers, computed in pieces for large logits.

    Args:
        logits (`Tensor`):
            Logits of every position, (batch, positions, vocabulary).
        labels (`Tensor` or `None`):
            Token ids, shifted by the function itself; None if `shift_labels` is among the keywords.
        vocab_size (`int`):
            Size of the vocabulary.
        kwargs:
            As in transformers: `num_items_in_batch`, `ignore_index`, `shift_labels`.

    Returns:
        `Tensor`: the loss, a scalar.
    """
    plain = type(logits) is Tensor and not torch.compiler.is_compiling()
    if not plain or logits.numel() <= _FEW * piece_size(logits):
        return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
    return _in_pieces(logits, labels, vocab_size, **kwargs)


def explain_missing_gradient(_model: nn.Module, _arguments: Any, output: Any) -> None:
    """Make `backward()` of the loss of a ticket raise `SLTError`, because nothing is trainable. A forward hook.

    If an adapter or a new head is trained, the loss has a gradient and is not changed.

    Args:
        output:
            What the forward returned.
    """
    loss = getattr(output, "loss", None)
    if not torch.is_tensor(loss) or loss.requires_grad:
        return
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        output.loss = NothingLearns.apply(loss, torch.zeros((), requires_grad=True))


class NothingLearns(torch.autograd.Function):
    """Returns its input unchanged. The backward pass raises an error that explains why nothing learns."""

    @staticmethod
    def forward(ctx, loss: Tensor, _: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, _):
        raise SLTError(
            "nothing in a ticket can be trained: its weights follow from a seed, and its mask is fixed; load "
            "the scores it was made from (save_pretrained of a model that learns), or add a LoRA adapter"
        )


def _in_pieces(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_kwargs,
) -> Tensor:
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # a token predicts the next
    wanted = shift_labels.reshape(-1).to(logits.device)
    known = wanted != ignore_index
    losses = TokenLosses.apply(logits.reshape(-1, vocab_size), wanted.where(known, 0))
    count = known.sum() if num_items_in_batch is None else num_items_in_batch
    return losses.where(known, 0).sum() / (count.to(logits.device) if torch.is_tensor(count) else count)


class TokenLosses(torch.autograd.Function):
    """Cross entropy in float32 of every token, from logits (tokens, vocabulary)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> Tensor:
        places, rows = labels.unsqueeze(1), _rows(logits)
        pieces = zip(logits.split(rows), places.split(rows), strict=True)
        return -torch.cat([some.float().log_softmax(-1).gather(1, place) for some, place in pieces])[:, 0]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, labels = ctx.saved_tensors
        places, shares = labels.unsqueeze(1), grad.unsqueeze(1)
        if torch.is_grad_enabled():  # the gradient is differentiated again, or torch.func is running
            return (_slopes(logits, labels) * shares).to(logits.dtype), None
        result, rows = torch.empty_like(logits), _rows(logits)
        pieces = (one.split(rows) for one in (logits, result, places, shares))
        for some, out, place, share in zip(*pieces, strict=True):
            softmax = torch.softmax(some.float(), -1, out=out if out.dtype == torch.float32 else None)
            out.copy_(softmax.mul_(share).scatter_add_(1, place, -share))  # copies nothing onto itself
        return result, None

    @staticmethod
    def jvp(ctx, moves: Tensor, _labels) -> Tensor:
        logits, labels = ctx.saved_tensors
        return (_slopes(logits, labels) * moves).sum(-1)


def _slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the gradient of every token's loss by its formula."""
    hits = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    return logits.float().softmax(-1) - hits.float()


def _rows(logits: Tensor) -> int:
    return max(1, piece_size(logits) // logits.shape[-1])
