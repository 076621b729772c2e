"""The examples with transformers' own Trainer, with few steps."""

import pytest
from train_with_trainer import TASKS, train

import hf_slt


@pytest.mark.parametrize(("task", "chance"), [("bert", 1 / 2), ("vit", 1 / 3)])
def test_a_ticket_is_better_than_chance_after_a_few_steps(task, chance, tmp_path):
    found = train(task, tmp_path, steps=50)
    assert found["right"] > chance + 0.15
    assert found["bytes"] < 20_000
    header = hf_slt.verify_ticket(tmp_path / "ticket")
    assert {name for name, one in header.tensors.items() if one.kind == "trained" and one.shape[0] > 1} == {
        "classifier"
    }
    assert header.tensors["classifier"].shape == (TASKS[task][1].num_labels, 64)
