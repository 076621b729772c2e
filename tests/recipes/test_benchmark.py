"""The benchmark's baselines compute what ours computes, only more slowly."""

import benchmark
import pytest
import torch

SHAPE = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}


def test_edge_popup_by_sorting_has_our_gradients():
    config = benchmark.SupermaskGPT2Config(**benchmark.NO_DROPOUT, **SHAPE)
    ids = torch.arange(32).view(2, -1)
    models = benchmark.edge_popup_twin(config), benchmark.SupermaskGPT2LMHeadModel(config)
    losses = [model(ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for (name, theirs), (_, ours) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("trick", benchmark.TRICKS)
def test_a_step_without_a_trick_is_the_same_step(trick, monkeypatch):
    monkeypatch.setattr("hf_slt.models.loss._FEW", 0)  # so that a small loss is in pieces too
    found = []
    for off in (trick, None):
        with benchmark.without(off):
            model = benchmark.SupermaskGPT2LMHeadModel(
                benchmark.SupermaskGPT2Config(**benchmark.NO_DROPOUT, **SHAPE)
            )
            ids = torch.arange(32).view(2, -1)
            model(ids, labels=ids).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for without, with_it in zip(*found, strict=True):
        torch.testing.assert_close(without, with_it, rtol=1e-4, atol=1e-7)


def test_few_launches_per_tensor():
    """Counted, not timed: 20 operators, of which 11 touch all values. Bit by bit there were 210 and 78."""
    for size in (200_000, 400_000):  # the number does not grow with the tensor
        values = torch.randn(size)
        with benchmark.Launches(size) as launches:
            mask = benchmark.keep_by_digits([values], size // 3, True)
        assert mask.sum() == size // 3
        assert values[mask].abs().min() >= values[~mask].abs().max()
        assert launches.all <= 20
        assert launches.full <= 11
    with benchmark.Launches(3) as launches:
        (torch.ones(3) + 1).view(1, 3).sum()
    assert (launches.all, launches.full) == (3, 3)
