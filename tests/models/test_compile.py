"""torch.compile, torch.export and torch.func: the gradients and masks of the plain model, in one graph."""

import io

import pytest
import torch
from cases import (
    IDS,
    assert_equals_stock,
    both_states,
    gradients,
    logits_of,
    make,
    these_cases,
    tiny_batch,
    tiny_config,
)
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from torch.testing import assert_close

from hf_slt import SupermaskGPT2LMHeadModel


@pytest.fixture(autouse=True)
def no_graph_of_before():
    torch.compiler.reset()


def check_compiled_training(backend: str, **changes) -> None:
    eager, compiled = (SupermaskGPT2LMHeadModel(tiny_config(n_layer=1, **changes)).train() for _ in range(2))
    step = torch.compile(compiled, fullgraph=True, backend=backend)
    exact = {"rtol": 0, "atol": 0} if backend != "inductor" else {"rtol": 1e-4, "atol": 1e-6}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (eager, compiled)]
    for index in range(3):
        batch, masks = tiny_batch(seed=index), eager.mask_arrays()
        losses = [model(batch, labels=batch).loss for model in (eager, step)]
        assert_close(losses[1], losses[0], **exact)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for name, parameter in eager.named_parameters():  # up to the order of a tied table's two parts
            assert_close(compiled.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)
            compiled.get_parameter(name).grad.copy_(parameter.grad)  # a rounding must not become another mask
        for optimizer in optimizers:
            optimizer.step()
        moved = eager.mask_arrays()
        assert all((moved[name] != masks[name]).any() for name in masks)


def test_compiled_training_step():
    check_compiled_training("aot_eager")


@pytest.mark.slow
@these_cases(
    "normal-untied", "normal-trained-4bit", "normal-low_rank", "uniform-no_norm", "xavier-free_heads"
)
def test_compiled_training_step_of_cases(changes):
    check_compiled_training("aot_eager", **changes)


@pytest.mark.slow
def test_compiled_training_step_by_inductor():
    check_compiled_training("inductor")


@both_states
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_forward(state, backend):
    model = make(state, n_layer=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    if backend == "aot_eager":
        assert torch.equal(logits_of(compiled), logits_of(model))
    assert_equals_stock(logits_of(compiled), model)


@pytest.mark.slow
def test_compiled_generation_with_a_static_cache():
    ticket = make("ticket", n_layer=1)
    options = {"do_sample": False, "max_new_tokens": 12, "cache_implementation": "static"}
    expected = ticket.merge_and_unload().generate(IDS, **options)
    ticket.forward = torch.compile(ticket.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(ticket.generate(IDS, **options), expected)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_of_a_ticket(strict):
    ticket = make("ticket")
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        ticket,
        (),
        {"input_ids": IDS, "use_cache": False},
        dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
        strict=strict,
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    other = tiny_batch(3, 7, seed=9)
    for exported in (program.module(), torch.export.load(buffer).module()):
        assert_equals_stock(exported(input_ids=IDS, use_cache=False).logits, ticket)
        found = exported(input_ids=other, use_cache=False).logits
        assert_close(found, logits_of(ticket, other), rtol=1e-5, atol=1e-5)


# -- torch.func ---------------------------------------------------------------------------------------


def loss_of(model):
    def loss(values, ids):
        batch = {"input_ids": ids, "labels": ids, "use_cache": False}
        return functional_call(model, values, (), batch).loss

    return loss, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@these_cases("normal", "normal-untied", "normal-trained", "normal-trained-4bit", "normal-low_rank")
def test_gradients_of_one_model_and_of_several(changes):
    model = make(**changes).train()
    loss, values = loss_of(model)
    expected = gradients(model)
    assert_close(grad(loss)(values, IDS), expected, rtol=1e-5, atol=1e-7)
    # Several models at once: the masks of each are its own.
    stacked = {name: torch.stack([one, one.flip(0), -2 * one]) for name, one in values.items()}
    slopes, losses = vmap(grad_and_value(loss), (0, None))(stacked, IDS)
    for index in range(3):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(stacked[name][index])
        assert_close(losses[index], model(IDS, labels=IDS).loss, rtol=1e-5, atol=1e-6)
        alone = gradients(model)
        assert_close({name: slopes[name][index] for name in values}, alone, rtol=1e-4, atol=1e-6)


def test_forward_derivative_is_that_of_the_gradient():
    model = make().train()
    model.set_attn_implementation("eager")
    loss, values = loss_of(model)
    direction = {name: torch.randn_like(value) for name, value in values.items()}
    _, slope = jvp(lambda values: loss(values, IDS), (values,), (direction,))
    along = sum((gradient * direction[name]).sum() for name, gradient in gradients(model).items())
    assert_close(slope, along, rtol=1e-3, atol=1e-5)


def test_per_sample_gradients():
    model = make(pad_token_id=None).train()  # else transformers looks for padding, which vmap cannot
    loss, values = loss_of(model)
    found = vmap(grad(loss), (None, 0))(values, IDS[:, None])
    for index, ids in enumerate(IDS):
        alone = gradients(model, input_ids=ids[None], labels=ids[None])
        assert_close({name: found[name][index] for name in values}, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("state", ["scores", "ticket"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_forward_mode_through_the_head_in_bfloat16(state, tied):
    model = make(state, tie_word_embeddings=tied, attn_implementation="eager")
    hidden = model.transformer.wte(IDS).detach()
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    _, exact = jvp(lambda x: model(inputs_embeds=x).logits, (hidden,), (direction,))
    half = model.to(torch.bfloat16)
    found = jvp(lambda x: half(inputs_embeds=x).logits, (hidden.bfloat16(),), (direction.bfloat16(),))[1]
    assert found.dtype == torch.bfloat16
    error = (found.float() - exact).norm() / exact.norm()
    assert error < 0.05
