"""The loss in pieces is transformers' own loss, up to rounding, with the same derivatives of all kinds."""

import pytest
import torch
from cases import gradients, tiny_config
from torch.func import functional_call, grad, jvp, vmap
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.masks import selection
from hf_slt.models import loss as loss_module
from hf_slt.models.loss import TokenLosses, causal_lm_loss

VOCABULARY = 37


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Seven tokens at a time: several pieces, the last of them not full."""
    monkeypatch.setattr(selection, "_PIECE", 7 * VOCABULARY + 3)
    monkeypatch.setattr(loss_module, "_FEW", 1)


def example(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 10, VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (3, 10), generator=generator)
    labels[0, 3:6] = -100
    return logits.to(dtype), labels


def spy(monkeypatch) -> list[int]:
    """Grows with every loss that is computed in pieces."""
    used: list[int] = []
    apply = TokenLosses.apply
    monkeypatch.setattr(TokenLosses, "apply", lambda *inputs: used.append(1) or apply(*inputs))
    return used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": torch.tensor(19)},
        {"num_items_in_batch": 19},
        {"ignore_index": 4},
        {"shift_labels": torch.arange(30).view(3, 10)},
    ],
    ids=str,
)
def test_the_same_loss_as_transformers(dtype, options, monkeypatch):
    logits, labels = example(dtype)
    if "ignore_index" in options:
        labels = labels.clamp_min(0)
    used = spy(monkeypatch)
    results = []
    for function in (causal_lm_loss, ForCausalLMLoss):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels, vocab_size=VOCABULARY, **options)
        (3 * loss).backward()
        results.append((loss, leaf.grad))
    assert used == [1]
    (ours, slope), (theirs, their_slope) = results
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert slope.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(slope, their_slope, rtol=8 * step, atol=step / 8)


def test_nothing_to_predict_is_nan_as_in_torch():
    logits, labels = example()
    loss = causal_lm_loss(logits, torch.full_like(labels, -100), vocab_size=VOCABULARY)
    assert loss.isnan()


def test_a_label_beyond_the_vocabulary_is_refused():
    logits, labels = example()
    labels[1, 2] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError)):
        causal_lm_loss(logits, labels, vocab_size=VOCABULARY)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 19}], ids=["mean", "sum"])
def test_derivatives_of_all_kinds(options):
    logits, labels = example()
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (causal_lm_loss, ForCausalLMLoss):

        def loss(x, function=function):
            return function(x, labels, vocab_size=VOCABULARY, **options)

        leaf = logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        second = torch.autograd.grad((slope * direction).sum(), leaf)[0]
        assert second.abs().max() > 1e-3
        forward = jvp(loss, (logits,), (direction,))[1]
        over_reverse = jvp(grad(loss), (logits,), (direction,))[1]
        many = vmap(grad(loss))(torch.stack([logits, 2 * logits]))
        results.append((second, forward, over_reverse, many))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)


def test_the_model_uses_it_and_a_loss_of_ones_own_replaces_it(monkeypatch):
    model = SupermaskGPT2LMHeadModel(tiny_config())
    monkeypatch.setattr(selection, "_PIECE", model.config.vocab_size)
    used = spy(monkeypatch)
    ids = torch.arange(32).view(2, 16)
    ours, slopes = model(ids, labels=ids).loss, gradients(model, input_ids=ids, labels=ids)
    assert used
    compiled = torch.compile(model, backend="aot_eager")(ids, labels=ids).loss  # by torch's own operator
    torch.compiler.reset()
    model.loss_function = ForCausalLMLoss
    torch.testing.assert_close(ours, model(ids, labels=ids).loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(model, input_ids=ids, labels=ids), slopes, rtol=1e-4, atol=1e-8)
    assert torch.equal(compiled, torch.compile(model, backend="aot_eager")(ids, labels=ids).loss)


def test_per_example_gradients_of_a_model():
    model = SupermaskGPT2LMHeadModel(tiny_config(pad_token_id=None))  # else transformers looks for it
    scores = dict(model.named_parameters())
    ids = torch.arange(48).view(3, 16) % model.config.vocab_size

    def loss(parameters, one):
        return functional_call(model, parameters, (one[None],), {"labels": one[None]}).loss

    ours = vmap(grad(loss), in_dims=(None, 0))(scores, ids)
    model.loss_function = ForCausalLMLoss
    theirs = vmap(grad(loss), in_dims=(None, 0))(scores, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
