"""Loaded onto devices, in parts, from disk or by accelerate: the same model, and no work done twice."""

from collections import Counter
from pathlib import Path

import accelerate
import pytest
import torch
from cases import (
    IDS,
    assert_equals_stock,
    both_states,
    logits_of,
    make,
    these_cases,
    tiny_config,
)
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel, TicketError
from hf_slt.model import layers, ticket
from hf_slt.model.random_weights import TensorSpec


@both_states
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_map(tmp_path, state, device_map):
    model = make(state)
    model.save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(logits_of(placed), logits_of(model))


@both_states
@these_cases("normal", "xavier-trained-untied", "normal-low_rank")
def test_disk_offload(tmp_path, state, changes):
    model = make(state, **changes)
    model.save_pretrained(tmp_path / "model")
    device_map = {"transformer.wpe": "disk", "transformer.h.1": "disk"}
    for name in ("wte", "h.0", "drop", "ln_f"):
        device_map[f"transformer.{name}"] = "cpu"
    if "tie_word_embeddings" in changes:
        device_map["lm_head"] = "disk"
    if "embedding_rank" in changes:  # a tied table that is used both ways
        device_map["transformer.wte"] = "disk"
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    if state == "scores":  # only a mask of a ticket is left, which is small enough to stay
        assert placed.transformer.h[1].attn.c_attn.key_scores.is_meta
    for _ in range(2):
        assert torch.equal(logits_of(placed), logits_of(model))
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(placed.generate(IDS, **options), model.merge_and_unload().generate(IDS, **options))


def test_offloaded_masks_are_refused_by_name(tmp_path):
    make("ticket").save_pretrained(tmp_path / "model")
    modules = ["wte", "wpe", "drop", "h.0", "ln_f", "h.1"]
    options = {
        "device_map": {f"transformer.{name}": "disk" if name == "h.1" else "cpu" for name in modules},
        "offload_folder": tmp_path / "offload",
        "offload_buffers": True,
    }
    with pytest.raises(RuntimeError, match=r"h\.1.* offload_buffers=False"):
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options))


@pytest.mark.parametrize("include_buffers", [False, True])
@both_states
def test_load_checkpoint_and_dispatch(tmp_path, state, include_buffers):
    model = make(state)
    model.save_pretrained(tmp_path)
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        empty = AutoModelForCausalLM.from_config(model.config)
    if include_buffers:
        empty.to_empty(device="cpu")
    placed = accelerate.load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"}).eval()
    assert torch.equal(logits_of(placed), logits_of(model))
    assert_equals_stock(logits_of(placed), model)


def test_a_configuration_of_another_model_is_refused(tmp_path):
    """The file is whole; it is the caller who gives another configuration than its own."""
    make(law="uniform").save_ticket(tmp_path)
    for changes, named in (
        ({"seed": 8}, "have digest .* was altered"),
        ({"qk_scale": 1.0}, r"h\.0\.attn\.c_attn\.key is .*, the configuration says"),
        ({"n_layer": 3}, r"h\.2\.attn\.c_attn\.key is missing"),
        ({"n_layer": 1}, r"h\.1\.attn\.c_attn\.key is no tensor of such a model"),
        ({"vocab_size": 70}, r"wte has shape \(64, 32\), the model wants \(70, 32\)"),
    ):
        config = tiny_config(law="uniform", **changes)
        with pytest.raises(TicketError, match=named):
            SupermaskGPT2LMHeadModel.from_pretrained(tmp_path, config=config)


# -- once ---------------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """How often each tensor was drawn, a mask file read, a mask hashed and a drawn weight hashed."""
    done = Counter()

    def count(owner, name, what):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            done[what(*args)] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(TensorSpec, "draw", lambda spec: spec.name)
    count(Path, "read_bytes", lambda path: path.name)
    count(ticket.DECODERS["entropy"], "decode_file", lambda *_: "decoded")
    for module in (ticket, layers):
        count(module, "digest", lambda array: f"{array.dtype} hashed")
    return done


@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_a_ticket_is_read_hashed_and_drawn_once(tmp_path, work, encoding):
    model = make(embedding="trained")
    masks, names = len(model.mask_arrays()), {*model.mask_arrays()}
    model.save_ticket(tmp_path, encoding=encoding)
    work.clear()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    del work["config.json"]
    wanted = {"mask.safetensors": 1, "uint8 hashed": masks, "float32 hashed": masks + 2}
    if encoding == "entropy":
        wanted["decoded"] = 1
    assert work == Counter(dict.fromkeys(names, 1) | wanted)
    # Nor is anything drawn by what comes after.
    work.clear()
    loaded.generate(IDS, max_new_tokens=4, do_sample=False)
    with torch.inference_mode():
        logits_of(loaded)
    assert not work


def test_learning_draws_nothing(work):
    model = make()
    assert max(work.values()) == 1
    work.clear()
    model.train()(IDS, labels=IDS).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    logits_of(model.eval())
    assert not work


@both_states
@these_cases("normal", "constant-frozen-untied")
def test_replicas_of_data_parallel_draw_nothing(state, changes, monkeypatch):
    """On each device: buffers are copies, parameters are plain tensors that lead back to the model's."""
    model = make(state, **changes)
    hidden = {"Linear": torch.randn(5, 32), "Embedding": torch.arange(5), "Head": torch.randn(5, 32)}
    expected = {}
    for path, layer in model.supermask_layers():
        kind = next(kind for kind in hidden if kind in type(layer).__name__)
        given = hidden[kind] if layer.shape[0] != 128 else torch.randn(5, 128)
        expected[path] = given, layer(given).detach()
    monkeypatch.setattr(TensorSpec, "draw", lambda spec: pytest.fail(f"{spec.name} is drawn again"))
    for path, layer in model.supermask_layers():
        given, output = expected[path]
        replica = layer._replicate_for_data_parallel()
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(replica, name, parameter.clone())
        for name, buffer in layer.named_buffers(recurse=False):
            replica._buffers[name] = buffer.clone()
        found = replica(given)
        assert torch.equal(found, output), path
        if layer.kind == "masked" and state == "scores":
            found.sum().backward()
            assert all(parameter.grad is not None for parameter in layer.parameters())
