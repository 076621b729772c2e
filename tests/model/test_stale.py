"""Nothing stale is ever used: however scores, masks or weights were changed, the next forward sees it.

The oracle knows none of the library's shortcuts: it sorts the scores, draws the weights, and puts their
product into stock GPT-2.
"""

import copy
import io

import numpy as np
import pytest
import torch
from cases import logits_of, tiny_batch, tiny_config, train_a_little
from torch import nn
from torch.testing import assert_close
from transformers import GPT2LMHeadModel

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.model.layers import SupermaskLayer
from hf_slt.model.masking import Selector
from hf_slt.model.random_weights import draw

IDS = tiny_batch()


@pytest.fixture(scope="module")
def blank() -> GPT2LMHeadModel:
    """A stock model to put weights into: no biases, no gains."""
    return SupermaskGPT2LMHeadModel(tiny_config()).merge_and_unload().eval()


def layers(model) -> dict[str, SupermaskLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SupermaskLayer)}


def sorted_mask(scores: torch.Tensor) -> np.ndarray:
    """The larger half by magnitude, the lower index first among equals."""
    values = np.abs(scores.detach().cpu().numpy().copy()).reshape(-1)
    mask = np.zeros(values.size, bool)
    mask[np.argsort(-values, kind="stable")[: values.size // 2]] = True
    return mask.reshape(scores.shape)


def stored_mask(packed: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    bits = np.unpackbits(packed.cpu().numpy().copy(), bitorder="little")
    return bits[: shape[0] * shape[1]].astype(bool).reshape(shape)


def oracle(blank: GPT2LMHeadModel, model, values: dict[str, torch.Tensor] | None = None) -> GPT2LMHeadModel:
    """Stock GPT-2 with the weights that follow from the model's state dict (or from `values`)."""
    values = model.state_dict() if values is None else values
    stock = copy.deepcopy(blank)
    for name, layer in layers(model).items():
        columns = []
        for part in layer.parts:
            stored = values.get(f"{name}.{part.prefix}scores")
            if stored is not None:
                mask = sorted_mask(stored)
            else:
                mask = stored_mask(values[f"{name}.{part.prefix}mask"], part.shape)
            columns.append(draw(7, part.name, part.shape, *model.config.law_of(part.name)) * mask)
        stock.get_parameter(f"{name}.weight").data.copy_(torch.from_numpy(np.concatenate(columns, 1)))
    return stock


def assert_current(blank: GPT2LMHeadModel, model) -> None:
    """Logits, and gradients of scores, are those of the scores as they stand."""
    stock = oracle(blank, model)
    assert_close(logits_of(model), logits_of(stock), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)
    if model.config.state == "ticket":
        return
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    stock(IDS, labels=IDS).loss.backward()
    for name, layer in layers(model).items():
        gradient = stock.get_parameter(f"{name}.weight").grad
        for part in layer.parts:
            scores = getattr(layer, f"{part.prefix}scores")
            frozen = torch.from_numpy(draw(7, part.name, part.shape, *model.config.law_of(part.name)))
            expected = gradient[:, part.columns] * frozen * scores.sign()
            assert_close(scores.grad, expected, rtol=1e-4, atol=1e-6)


# -- ways to change scores ----------------------------------------------------------------------------


def other_scores(model, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def by_optimizer(optimizer_class, **options):
    def change(model):
        optimizer_class(model.parameters(), **options).step()  # on the gradients of the last backward

    return change


def each(change):
    """A change of one parameter, given other values for it, as a change of all."""

    def change_all(model):
        others = other_scores(model)
        for name, parameter in model.named_parameters():
            change(parameter, others[name])

    return change_all


def without_grad(change):
    return torch.no_grad()(each(change))


def shuffle(parameter, _):
    order = torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(3))
    parameter.data.copy_(parameter.data.flatten()[order].view_as(parameter))


def swap_pair(parameter, _):
    """Only the smallest and the largest score change places: the values are the same ones."""
    flat = parameter.data.view(-1)
    pair = torch.stack([flat.abs().argmin(), flat.abs().argmax()])
    flat[pair] = flat[pair.flip(0)]


def assign_data(parameter, other):
    parameter.data = other


def assign_transposed(parameter, other):
    parameter.data = other.t().contiguous().t()


def through_numpy(parameter, other):
    parameter.detach().numpy()[...] = other.numpy()


def through_a_view(parameter, other):
    parameter.detach().view(-1)[: parameter.numel() // 2] = other.view(-1)[: parameter.numel() // 2]


def replace_parameters(model):
    for name, other in other_scores(model).items():
        path, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(path), leaf, nn.Parameter(other))


def swap_tensors(model):
    others = other_scores(model)
    for name, parameter in list(model.named_parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(others[name]))


def load(assign):
    return lambda model: model.load_state_dict(other_scores(model), assign=assign)


def from_a_vector(model):
    vector = torch.cat([other.flatten() for other in other_scores(model).values()])
    nn.utils.vector_to_parameters(vector, model.parameters())


@torch.inference_mode()
def in_inference_mode(model):
    for parameter in model.parameters():
        parameter.copy_(parameter.flip(0))


def foreach(model):
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), list(other_scores(model).values()))


WAYS = {
    "sgd": by_optimizer(torch.optim.SGD, lr=30.0),
    "adamw": by_optimizer(torch.optim.AdamW, lr=0.1),
    "adamw-foreach": by_optimizer(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw-fused": by_optimizer(torch.optim.AdamW, lr=0.1, fused=True),
    "sgd-fused": by_optimizer(torch.optim.SGD, lr=30.0, fused=True),
    "data.copy_": each(lambda parameter, other: parameter.data.copy_(other)),
    "data.mul_": each(lambda parameter, other: parameter.data.mul_(other)),
    "data.flip": each(lambda parameter, _: parameter.data.copy_(parameter.data.flip(0, 1))),
    "data.permutation": each(shuffle),
    "data.swap_pair": each(swap_pair),
    "data.round_to_ties": each(lambda parameter, _: parameter.data.mul_(8).round_()),
    "data.all_equal": each(lambda parameter, _: parameter.data.fill_(0.5)),
    "data=": each(assign_data),
    "data=transposed": each(assign_transposed),
    "no_grad.copy_": without_grad(lambda parameter, other: parameter.copy_(other)),
    "no_grad.add_": without_grad(lambda parameter, other: parameter.add_(other)),
    "no_grad.index": without_grad(lambda parameter, other: parameter.__setitem__(slice(0, 3), other[:3])),
    "init": each(lambda parameter, _: nn.init.uniform_(parameter, -2, 2)),
    "inference_mode": in_inference_mode,
    "foreach_add_": foreach,
    "numpy": each(through_numpy),
    "view": each(through_a_view),
    "replaced_parameter": replace_parameters,
    "swap_tensors": swap_tensors,
    "load_state_dict": load(assign=False),
    "load_state_dict-assign": load(assign=True),
    "vector_to_parameters": from_a_vector,
}


@pytest.fixture
def model():
    """Scores that have been trained, with everything that a layer may remember in place."""
    model = train_a_little(SupermaskGPT2LMHeadModel(tiny_config()))
    model(IDS, labels=IDS).loss.backward()
    logits_of(model)
    return model


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_change_of_scores_is_seen(model, blank, way):
    before = logits_of(model)
    way(model)
    assert not torch.equal(logits_of(model), before)
    assert_current(blank, model)
    way(model)  # and again, from whatever the first change left behind
    assert_current(blank, model)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_change_of_one_part_is_seen(model, blank, name):
    scores = getattr(model.transformer.h[1].attn.c_attn, f"{name}_scores")
    before = logits_of(model)
    scores.data.copy_(scores.data.flip(0))
    assert not torch.equal(logits_of(model), before)
    assert_current(blank, model)


def test_averages_swapped_in_and_out(model, blank):
    average = torch.optim.swa_utils.AveragedModel(model)
    before = logits_of(model)
    for way in ("data.copy_", "data.permutation"):
        WAYS[way](model)
        average.update_parameters(model)
    assert_current(blank, average.module)
    # By hand, as most loops do it: the averages in place for an evaluation, then the scores again.
    last = logits_of(model)
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
        parameter.data.copy_(mean.data)
    assert_current(blank, model)
    assert not torch.equal(logits_of(model), last)
    assert not torch.equal(logits_of(model), before)
    for parameter, scores in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(scores)
    assert torch.equal(logits_of(model), last)
    # By pointer.
    for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
        parameter.data, mean.data = mean.data, parameter.data
    assert_current(blank, model)
    assert_current(blank, average.module)


def test_copies_do_not_share_what_they_remember(model, blank):
    before = logits_of(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        WAYS["data.copy_"](twin)
        assert_current(blank, twin)
        assert torch.equal(logits_of(model), before)
    WAYS["data.permutation"](model)
    assert_current(blank, model)


@pytest.mark.parametrize("wrap", [lambda values: values, nn.Parameter], ids=["tensors", "parameters"])
def test_functional_calls_between_forwards(model, blank, wrap):
    before = logits_of(model)
    found = []
    for seed in (1, 2):
        values = {name: wrap(scores) for name, scores in other_scores(model, seed).items()}
        found.append(torch.func.functional_call(model, values, (IDS,)).logits)
        assert_close(found[-1], oracle(blank, model, values)(IDS).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0], found[1])
    assert torch.equal(logits_of(model), before)
    assert_current(blank, model)


def test_two_functional_calls_in_one_graph(model):
    """Two sets of scores at once, as in a contrast of two masks: neither may overwrite the other."""
    sets = [
        {name: nn.Parameter(scores) for name, scores in other_scores(model, seed).items()} for seed in (1, 2)
    ]

    def loss(values):
        return torch.func.functional_call(model, values, (IDS,), {"labels": IDS}).loss

    alone = [torch.autograd.grad(loss(values), values.values()) for values in sets]
    sum(loss(values) for values in sets).backward()
    for values, gradients in zip(sets, alone, strict=True):
        for parameter, gradient in zip(values.values(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_backward_after_scores_changed(model):
    """A graph keeps the masks that it was made with, even where `.data` hides the change from autograd."""
    loss = model(IDS, labels=IDS).loss
    parameters = list(model.parameters())
    expected = [
        gradient * parameter.sign()
        for gradient, parameter in zip(
            torch.autograd.grad(loss, parameters, retain_graph=True), parameters, strict=True
        )
    ]
    WAYS["data.mul_"](model)
    logits_of(model)
    found = torch.autograd.grad(loss, parameters)
    for gradient, old, parameter in zip(found, expected, parameters, strict=True):
        assert_close(gradient * parameter.sign(), old, rtol=1e-5, atol=1e-7)


# -- frozen weights -----------------------------------------------------------------------------------


def restore_by_cast(dtype):
    def change(model):
        model.to(dtype)
        logits_of(model)
        model.float()

    return change


WEIGHT_WAYS = {
    "zero_": lambda layer: layer.weight.zero_(),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "replaced": lambda layer: setattr(layer, "weight", torch.zeros_like(layer.weight)),
    "to_empty": lambda layer: layer.weight.copy_(torch.full_like(layer.weight, torch.nan)),
}


@pytest.mark.parametrize("state", ["scores", "ticket"])
@pytest.mark.parametrize("way", WEIGHT_WAYS.values(), ids=WEIGHT_WAYS.keys())
def test_overwritten_weights_are_drawn_again(model, blank, state, way):
    model = model if state == "scores" else model.to_ticket()
    logits_of(model)
    with torch.no_grad():
        for layer in layers(model).values():
            way(layer)
    assert_current(blank, model)


@pytest.mark.parametrize("state", ["scores", "ticket"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("then", ["forward", "regenerate", "functional_call", "to_ticket"])
def test_cast_and_back(model, blank, state, dtype, then):
    model = model if state == "scores" else model.to_ticket()
    expected = logits_of(model)
    restore_by_cast(dtype)(model)
    if then == "functional_call":
        values = {name: values.detach() for name, values in model.state_dict().items()}
        assert torch.equal(torch.func.functional_call(model, values, (IDS,)).logits, expected)
    if then == "regenerate":
        model.regenerate()
    if then == "to_ticket":
        model = model.to_ticket()
    assert torch.equal(logits_of(model), expected)
    assert_current(blank, model)


# -- masks of a ticket --------------------------------------------------------------------------------


def every_mask(change):
    """A change of one mask (layer, part, name of the buffer) as a change of all."""

    def change_all(ticket):
        for layer in layers(ticket).values():
            for part in layer.parts:
                change(layer, part, f"{part.prefix}mask")

    return change_all


def set_mask(layer, part, _):
    layer.set_masks({part.name: ~layer.mask_of(part).numpy()})


def load_masks(assign):
    def change(ticket):
        ticket.load_state_dict({name: ~mask for name, mask in ticket.state_dict().items()}, assign=assign)

    return change


MASK_WAYS = {
    "copy_": every_mask(lambda layer, _, name: getattr(layer, name).copy_(~getattr(layer, name))),
    "bitwise_not_": every_mask(lambda layer, _, name: getattr(layer, name).bitwise_not_()),
    "flip": every_mask(lambda layer, _, name: getattr(layer, name).copy_(getattr(layer, name).flip(0))),
    "set_mask": every_mask(set_mask),
    "replaced_buffer": every_mask(lambda layer, _, name: setattr(layer, name, ~getattr(layer, name))),
    "load_state_dict": load_masks(assign=False),
    "load_state_dict-assign": load_masks(assign=True),
}
mask_ways = pytest.mark.parametrize("way", MASK_WAYS.values(), ids=MASK_WAYS.keys())


@mask_ways
def test_a_change_of_masks_is_seen(model, blank, way):
    ticket = model.to_ticket()
    before = logits_of(ticket)
    assert_current(blank, ticket)
    for _ in range(2):
        way(ticket)
        assert_current(blank, ticket)
    assert torch.equal(logits_of(ticket), before) or way is MASK_WAYS["flip"]


@mask_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_change_of_a_copied_ticket_is_seen(model, blank, way, dtype):
    ticket = model.to_ticket().to(dtype)
    before = logits_of(ticket)
    twin = copy.deepcopy(ticket)
    way(twin)
    changed = logits_of(twin)
    assert not torch.equal(changed, before)
    assert torch.equal(logits_of(ticket), before)
    assert_current(blank, twin.float())
    way(ticket)
    assert torch.equal(logits_of(ticket), changed)


@pytest.mark.parametrize("name", ["set_mask", "load_state_dict", "load_state_dict-assign"])
def test_a_change_in_inference_mode_is_seen(model, blank, name):
    with torch.inference_mode():
        ticket = model.to_ticket()
        assert_current(blank, ticket)
        MASK_WAYS[name](ticket)
        assert_current(blank, ticket)
    assert_current(blank, ticket)


@pytest.mark.parametrize("warm", [False, True], ids=["before_any_forward", "after_a_forward"])
def test_compiled_ticket_is_current(model, blank, warm):
    """A compiled forward cannot look whether a mask was replaced: what the library does is done at once."""
    ticket = model.to_ticket()
    if warm:
        logits_of(ticket)
    torch.compiler.reset()
    compiled = torch.compile(ticket, fullgraph=True, backend="eager")
    assert_close(logits_of(compiled), logits_of(oracle(blank, model)), rtol=1e-5, atol=1e-5)
    for way in ("set_mask", "load_state_dict", "load_state_dict-assign"):
        MASK_WAYS[way](ticket)
        assert_close(logits_of(compiled), logits_of(oracle(blank, ticket)), rtol=1e-5, atol=1e-5)
    ticket.half().float()
    assert_close(logits_of(compiled), logits_of(oracle(blank, ticket)), rtol=1e-5, atol=1e-5)


def test_compiled_scores_are_current(model, blank):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = logits_of(model)
    model.half().float()
    assert torch.equal(logits_of(compiled), expected)
    for way in ("adamw", "numpy", "data.permutation", "load_state_dict", "data.flip"):
        WAYS[way](model)
        found = logits_of(compiled)
        assert_close(found, logits_of(oracle(blank, model)), rtol=1e-5, atol=1e-5)
        assert not torch.equal(found, expected)
        expected = found


# -- and nothing is done twice ------------------------------------------------------------------------


@pytest.fixture
def sorts(monkeypatch):
    """One entry for every time that a threshold is looked for."""
    calls = []
    search = Selector._search
    monkeypatch.setattr(Selector, "_search", lambda *args: calls.append(1) or search(*args))
    return calls


def remembered(model) -> list[tuple[int, int]]:
    """Which masked weights are in use, and how often each was written."""
    return [(id(layer._masked), layer._masked._version) for layer in layers(model).values()]


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not_reentrant"])
def test_masks_are_made_once_per_optimizer_step(sorts, checkpointing):
    model = SupermaskGPT2LMHeadModel(tiny_config()).train()
    parts = sum(len(layer.parts) for layer in layers(model).values())
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    in_use = []  # the tensors themselves, so that no id is given to another
    for step in range(3):
        seen = []
        for accumulated in range(4):
            batch = tiny_batch(seed=4 * step + accumulated)
            model(batch, labels=batch).loss.backward()
            seen.append(remembered(model))
        logits_of(model.eval())
        model.train()
        seen.append(remembered(model))
        assert all(one == seen[0] for one in seen)
        assert len(sorts) == (step + 1) * parts
        assert not in_use or not set(seen[0]) & set(in_use[-1][1])
        in_use.append(([layer._masked for layer in layers(model).values()], seen[0]))
        optimizer.step()
        optimizer.zero_grad()


def test_generation_makes_no_mask(model, sorts):
    before = remembered(model)
    model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert remembered(model) == before
    assert not sorts


def test_a_scaled_score_needs_no_new_mask(model):
    """Same masks, same masked weights: they are written again only when a mask changed."""
    logits_of(model)
    before = remembered(model)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    logits_of(model)
    assert remembered(model) == before
