"""A ternary model against the ticket that it was made of."""

import copy

import pytest
import torch
from cases import IDS, logits_of, make
from torch.testing import assert_close

from hf_slt import SupermaskGPT2LMHeadModel, verify_ticket
from hf_slt.sharing.export import TernaryLayer

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


def test_weights_are_exact_and_no_longer_kept(ticket):
    ternary = ticket.to_ternary()
    for layer in ternary_layers(ternary):
        twin = next(one for _, one in ticket.supermask_layers() if one.tensors == layer.tensors)
        assert torch.equal(layer.masked_weight(), twin.masked_weight())
        assert layer.weight.numel() == 0
        identity = torch.eye(layer.shape[0] if layer.inputs_first else layer.shape[1])
        product = layer(identity) if not layer.is_table else layer(identity, unembed=True)
        assert torch.equal(product if layer.inputs_first else product.T, twin.masked_weight())
        if layer.is_table:
            assert torch.equal(layer(torch.arange(layer.shape[0])), twin.masked_weight())


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
        model.transformer.h[1].mlp.c_fc.mask.bitwise_not_()
    assert_close(logits_of(ternary), logits_of(ticket), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, logits_of(ticket))
    for model in (ternary, ticket):
        model.set_mask(None)
    assert_close(logits_of(ternary), logits_of(ticket), rtol=1e-5, atol=1e-5)
    assert_close(logits_of(twin), before, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_weights_are_still_exact(ticket):
    """The ticket rounds its weights there; signs need no rounding."""
    half = ticket.to_ternary().bfloat16()
    assert half.dtype == torch.bfloat16
    assert_close(logits_of(half), logits_of(ticket), rtol=0.05, atol=0.05)
    if ticket.config.embedding != "trained":
        assert_close(logits_of(half.float()), logits_of(ticket), rtol=1e-5, atol=1e-5)


def test_errors_name_the_cure(ticket):
    ternary = ticket.to_ternary()
    if ticket.config.embedding == "masked" and ticket.config.embedding_law is None:
        with pytest.raises(RuntimeError, match="resize the ticket"):
            ternary.resize_token_embeddings(70)
    with pytest.raises(RuntimeError, match="on a CPU only"):
        ternary.to("meta")
    with pytest.raises(ValueError, match=r"law 'normal'.*signed_constant and factors -1, 0 and 1 are needed"):
        make().to_ternary()
