"""`supermask_` on plain torch modules."""

import torch
from torch import nn
from torch.testing import assert_close

import hf_slt
from hf_slt.masks.modules import MaskedModule


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(4 * 36), nn.Linear(4 * 36, 5, bias=True)
    )


def test_only_scores_train_and_half_of_each_weight_is_kept():
    module = hf_slt.supermask_(network(), seed=7, density=0.5)
    trained = [name for name, one in module.named_parameters() if one.requires_grad]
    assert trained == ["0.scores", "4.scores"]
    assert [int((module[place].weight != 0).sum()) for place in (0, 4)] == [54, 360]
    assert [type(one).__name__ for one in module] == ["Conv2d", "ReLU", "Flatten", "LayerNorm", "Linear"]


def test_it_learns_and_can_be_fixed():
    torch.manual_seed(0)
    module = hf_slt.supermask_(network(), seed=7, density=0.5, scales=True)
    images, labels = torch.randn(32, 3, 8, 8), torch.arange(32) % 5
    optimizer = torch.optim.Adam([one for one in module.parameters() if one.requires_grad], lr=0.02)
    losses = []
    for _ in range(30):
        losses.append(nn.functional.cross_entropy(module(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    expected = module(images)
    hf_slt.fix_masks_(module)
    assert_close(module(images), expected, rtol=0, atol=0)
    assert not [one for one in module.modules() if isinstance(one, MaskedModule)]
    assert {name for name, _ in module.named_parameters()} == {
        name for name, _ in network().named_parameters()
    }


def test_a_filter_leaves_parameters_as_they_are():
    plain = network()
    before = plain[4].weight.detach().clone()
    module = hf_slt.supermask_(plain, filter_fn=lambda holder, name: not isinstance(holder, nn.Linear))
    assert torch.equal(module[4].weight, before)
    assert not module[4].weight.requires_grad
    assert hasattr(module[0], "scores")
