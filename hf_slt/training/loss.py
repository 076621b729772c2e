"""The loss of a language model, over a vocabulary in pieces that stay in a core's cache.

    loss = -mean over tokens of log softmax(logits)[label]           # transformers' ForCausalLMLoss

The same numbers to the last bit as torch's cross entropy, by the same operators. But that keeps the
log-probabilities for its backward, and makes two more tensors as large there; with 50257 tokens to choose
from, such memory, fresh at every step, costs more than the arithmetic. Here the logits alone are kept, and
the log-probabilities of a few tokens at a time are computed twice.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from .selection import piece_size

_MEAN, _SUM = 1, 2  # how the operators number their reductions
_FEW = 16  # pieces; less memory than so many stays with the process, and is not fresh


def causal_lm_loss(logits: Tensor, labels: Tensor | None, vocab_size: int, **kwargs) -> Tensor:
    """`ForCausalLMLoss` of transformers, which see; in pieces where there are several."""
    plain = type(logits) is Tensor and not torch.compiler.is_compiling()
    if not plain or logits.numel() <= _FEW * piece_size(logits):
        return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
    return _in_pieces(logits, labels, vocab_size, **kwargs)


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
    flat = logits.reshape(-1, vocab_size)
    wanted = shift_labels.reshape(-1).to(logits.device)
    if num_items_in_batch is None:
        return CrossEntropy.apply(flat, wanted, ignore_index, _MEAN)
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return CrossEntropy.apply(flat, wanted, ignore_index, _SUM) / num_items_in_batch


class CrossEntropy(torch.autograd.Function):
    """`F.cross_entropy` of logits (tokens, vocabulary) in float32, its sum or its mean."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore: int, reduction: int) -> Tensor:
        known = labels != ignore
        places = torch.where(known, labels, 0).unsqueeze(1)
        rows = _rows(logits)
        pieces = zip(logits.split(rows), places.split(rows), strict=True)
        taken = torch.cat([some.float().log_softmax(-1).gather(1, place) for some, place in pieces])
        # The operator's own sum, of one column: added in the same order.
        column = torch.where(known, 0, ignore)
        return torch.ops.aten.nll_loss_forward(taken, column, None, reduction, ignore)[0]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        logits, labels, ctx.ignore, ctx.reduction = inputs
        ctx.save_for_backward(logits, labels)
        ctx.save_for_forward(logits, labels)

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # it will be differentiated again, or torch.func is at work
            return (_slopes(ctx, logits, labels) * grad).to(logits.dtype), None, None, None
        total = (labels != ctx.ignore).sum().float()
        result = torch.empty_like(logits)
        rows = _rows(logits)
        for some, wanted, out in zip(*(one.split(rows) for one in (logits, labels, result)), strict=True):
            logs = some.float().log_softmax(-1)
            chosen = torch.ops.aten.nll_loss_backward(
                grad, logs, wanted, None, ctx.reduction, ctx.ignore, total
            )
            if out.dtype == torch.float32:
                torch._log_softmax_backward_data(chosen, logs, -1, torch.float32, out=out)
            else:
                out.copy_(torch._log_softmax_backward_data(chosen, logs, -1, torch.float32))
        return result, None, None, None

    @staticmethod
    def jvp(ctx, moves: Tensor, _labels, _ignore, _reduction) -> Tensor:
        logits, labels = ctx.saved_tensors
        return (_slopes(ctx, logits, labels) * moves).sum()


def _slopes(ctx, logits: Tensor, labels: Tensor) -> Tensor:
    """How the loss changes with each logit, as a formula: softmax minus one at the label."""
    known = (labels != ctx.ignore).unsqueeze(1)
    hits = torch.arange(logits.shape[1], device=logits.device) == labels.unsqueeze(1)
    slopes = (logits.float().softmax(-1) - hits.float()) * known
    return slopes / known.sum() if ctx.reduction == _MEAN else slopes


def _rows(logits: Tensor) -> int:
    return max(1, piece_size(logits) // logits.shape[-1])
