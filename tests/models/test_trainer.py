"""transformers' Trainer: moves scores only, scales the loss as for stock GPT-2, and resumes bit for bit."""

import pytest
import torch
from cases import (
    IDS,
    assert_same_values,
    gradients,
    learned,
    logits_of,
    make,
    these_cases,
    tiny_batch,
    tiny_config,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_slt import SupermaskGPT2LMHeadModel


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    """Rows of unlike many labels, so that a mean of means is not the mean."""
    examples = []
    for index, ids in enumerate(tiny_batch(count, 12, seed=3)):
        labels = ids.clone()
        labels[: index % 5 * 2] = -100
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def trainer(folder, model=None, **options) -> Trainer:
    settings = {
        "learning_rate": 0.05,
        "lr_scheduler_type": "linear",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(folder), **(settings | options))
    model = model or SupermaskGPT2LMHeadModel(tiny_config())
    return Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(4))


def test_trainer_moves_scores_only_and_learns(tmp_path):
    run = trainer(tmp_path, max_steps=12)
    model = run.model
    frozen, scores = {name: buffer.clone() for name, buffer in model.named_buffers()}, learned(model)
    first = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < first - 0.1
    assert_same_values(dict(model.named_buffers()), frozen)
    assert not any(torch.equal(values, scores[name]) for name, values in learned(model).items())
    optimized = {id(one) for group in run.optimizer.param_groups for one in group["params"]}
    assert optimized == {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_scales_the_loss_as_stock(tmp_path, accumulate):
    model = make()
    stock = model.merge_and_unload()
    options = {"learning_rate": 0.0, "max_steps": 1, "per_device_train_batch_size": 8 // accumulate}
    options |= {"gradient_accumulation_steps": accumulate, "max_grad_norm": 1e9}
    run = trainer(tmp_path, model, **options)
    run.train()
    batch = {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    log = next(entry for entry in run.state.log_history if "grad_norm" in entry)
    assert log["loss"] == pytest.approx(stock(**batch).loss.item(), rel=1e-3)  # the log is rounded
    norm = torch.stack([gradient.norm() for gradient in gradients(model, **batch).values()]).norm()
    assert log["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    stock.loss_type = model.loss_type
    dense = trainer(tmp_path, stock, **options)
    dense.train()
    assert dense.state.log_history[0]["loss"] == pytest.approx(log["loss"], abs=2e-4)


@these_cases("normal", "xavier-trained-untied")
def test_trainer_resumes_bit_for_bit(tmp_path, changes):
    def run(folder, **options):
        return trainer(tmp_path / folder, SupermaskGPT2LMHeadModel(tiny_config(**changes)), **options)

    straight, cut, resumed = run("straight"), run("cut", save_strategy="steps", save_steps=2), run("cut")
    straight.train()
    cut.train()
    with torch.no_grad():  # nothing of the first scores may be left after the load
        for parameter in resumed.model.parameters():
            parameter.normal_()
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert_same_values(learned(resumed.model), learned(straight.model))
    assert_same_values(learned(cut.model), learned(straight.model))


def test_trainer_loads_the_best_model_at_the_end(tmp_path):
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    run = trainer(tmp_path, **each, **best)  # the "best" is then not the last
    run.train()
    assert not run.state.best_model_checkpoint.endswith("-4")
    saved = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    assert_same_values(learned(run.model), learned(saved))
    assert torch.equal(logits_of(run.model), logits_of(saved))
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not torch.equal(logits_of(last), logits_of(saved))


# -- gradient checkpointing -----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@these_cases("normal", "normal-trained", "normal-low_rank", "theory")
def test_gradient_checkpointing(reentrant, changes):
    model = make(**changes).train()
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # frozen embeddings have no gradient to start from
    calls = []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_same_values(gradients(model), expected)
    assert len(calls) == 2  # once more in the backward pass
    model.gradient_checkpointing_disable()
    assert_same_values(gradients(model), expected)


def test_gradient_checkpointing_in_trainer(tmp_path):
    plain, spared = trainer(tmp_path), trainer(tmp_path, gradient_checkpointing=True)
    plain.train()
    spared.train()
    assert_same_values(learned(spared.model), learned(plain.model))


def test_inference_mode_then_training():
    model = make()
    expected = gradients(model.train())
    fresh = SupermaskGPT2LMHeadModel(tiny_config())
    fresh.load_state_dict(model.state_dict())
    with torch.inference_mode():  # the first forward: all that a layer remembers is made here
        logits = fresh.eval()(IDS).logits
    assert torch.equal(logits, logits_of(model.eval()))
    assert_same_values(gradients(fresh.train()), expected)
    with torch.inference_mode():
        ticket = model.to_ticket()
        assert torch.equal(logits_of(ticket), logits)
    assert torch.equal(logits_of(ticket), logits)
