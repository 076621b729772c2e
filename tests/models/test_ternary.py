"""A ternary model against the ticket that it was made of."""

import copy

import pytest
import torch
from cases import IDS, logits_of, make
from torch.testing import assert_close

from hf_slt import SLTError, SupermaskGPT2LMHeadModel, verify_ticket
from hf_slt.models.ternary import TernaryLayer

KINDS = {
    "masked": {},
    "frozen": {"embedding": "frozen"},
    "untied": {"tie_word_embeddings": False},
    "trained": {"embedding": "trained"},
    "low_rank": {"embedding": "trained", "embedding_rank": 12},
    "normal_embeddings": {"embedding_law": "normal"},
    "free_heads": {"n_qk": 6, "n_v": 10},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def ticket(request):
    return make("ticket", law="signed_constant", **request.param)


def ternary_layers(model) -> list[TernaryLayer]:
    return [layer for layer in model.modules() if isinstance(layer, TernaryLayer)]


def test_logits_and_greedy_tokens_are_the_ticket_s(ticket):
    ternary = ticket.to_ternary()
    assert len(ternary_layers(ternary)) >= 8
    assert_close(logits_of(ternary), logits_of(ticket), rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ternary.generate(IDS, **options), ticket.generate(IDS, **options))


def test_weights_are_exact(ticket):
    ternary = ticket.to_ternary()
    for path, layer in ternary.named_modules():
        if not isinstance(layer, TernaryLayer):
            continue
        weight = ticket.get_submodule(path).weight
        assert torch.equal(layer.weight, weight)
        if layer.is_table:
            assert torch.equal(layer(torch.arange(len(weight))), weight)
        else:
            product = layer(torch.eye(weight.shape[1 if layer.outputs_first else 0]))
            assert torch.equal(product.T if layer.outputs_first else product, weight)
    assert not [name for name, _ in ternary.named_parameters() if name.endswith("c_fc.weight")]


def test_made_of_scores_too():
    model = make(law="signed_constant")
    assert_close(logits_of(model.to_ternary()), logits_of(model), rtol=1e-5, atol=1e-5)


def test_saves_and_merges_like_the_ticket(ticket, tmp_path):
    ternary = ticket.to_ternary()
    ternary.save_ticket(tmp_path / "a")
    ternary.save_pretrained(tmp_path / "b")
    assert verify_ticket(tmp_path / "a").mask_digest == ticket.save_ticket(tmp_path / "c").mask_digest
    for folder in ("a", "b"):
        loaded = SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert not ternary_layers(loaded)
        assert torch.equal(logits_of(loaded), logits_of(ticket))
    if ticket.config.qk_width == ticket.config.v_width:
        assert torch.equal(logits_of(ternary.merge_and_unload()), logits_of(ticket.merge_and_unload()))
    assert torch.equal(logits_of(ternary.to_ticket()), logits_of(ticket))


def test_a_change_of_masks_is_seen(ticket):
    ternary = ticket.to_ternary()
    twin, before = copy.deepcopy(ternary), logits_of(ticket)
    for model in (ternary, ticket):
        model.set_mask(None)
    assert_close(logits_of(ternary), logits_of(ticket), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, logits_of(ticket))
    ternary.set_mask("default")
    assert_close(logits_of(ternary), before, rtol=1e-5, atol=1e-5)
    assert_close(logits_of(twin), before, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_weights_are_still_exact(ticket):
    """The ticket rounds its weights there; signs need no rounding."""
    half = ticket.to_ternary().bfloat16()
    assert half.dtype == torch.bfloat16
    assert_close(logits_of(half), logits_of(ticket), rtol=0.05, atol=0.05)
    if ticket.config.embedding == "masked" and ticket.config.embedding_law is None:
        assert_close(logits_of(half.float()), logits_of(ticket), rtol=1e-5, atol=1e-5)


def test_errors_name_the_cure(ticket):
    ternary = ticket.to_ternary()
    if ticket.config.embedding == "masked" and ticket.config.embedding_law is None:
        with pytest.raises(SLTError, match="resize the ticket"):
            ternary.resize_token_embeddings(70)
    with pytest.raises(RuntimeError, match="on a CPU only"):
        ternary.to("meta")
    with pytest.raises(ValueError, match=r"law 'normal'.*signed_constant and factors -1, 0 and 1 are needed"):
        make().to_ternary()
