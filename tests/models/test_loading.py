"""Loaded onto devices, in parts, from disk or by accelerate: the same model, and no work done twice."""

from collections import Counter
from dataclasses import replace

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
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from hf_slt import (
    SLTError,
    SupermaskGPT2Config,
    SupermaskGPT2LMHeadModel,
    TicketError,
    supermask_config,
    verify_ticket,
)
from hf_slt.masks.modules import MaskedModule
from hf_slt.models import modeling
from hf_slt.tickets import format
from hf_slt.weights import codes
from hf_slt.weights.random_weights import TensorSpec


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
    device_map["lm_head"] = "disk" if "tie_word_embeddings" in changes else "cpu"
    if "embedding_rank" in changes:  # a tied table that is used both ways
        device_map["transformer.wte"] = device_map["lm_head"] = "disk"
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    attention = placed.transformer.h[1].attn.c_attn
    assert (attention.key_scores if state == "scores" else attention.weight).is_meta
    for _ in range(2):
        assert torch.equal(logits_of(placed), logits_of(model))
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(placed.generate(IDS, **options), model.merge_and_unload().generate(IDS, **options))


def test_offload_of_learned_scales_gains_and_biases(tmp_path):
    """As the presets have them: they are part of the weights, wherever these are."""
    changes = {"rule": "signed", "density": None, "scales": "row", "layer_norm": "trained", "head_bias": True}
    model = make("ticket", **changes)
    expected = logits_of(model)
    model.save_ticket(tmp_path / "ticket", encoding="entropy")
    on_cpu = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert torch.equal(logits_of(accelerate.cpu_offload(on_cpu, torch.device("cpu"))), expected)
    for number, device_map in enumerate((dict.fromkeys(["transformer", "lm_head"], "disk"), "auto")):
        options = {"max_memory": {"cpu": 60_000}} if device_map == "auto" else {}
        placed = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ticket",
            device_map=device_map,
            offload_folder=tmp_path / f"offload-{number}",
            **options,
        )
        assert "disk" in placed.hf_device_map.values()
        assert torch.equal(logits_of(placed), expected)


def test_a_mask_file_by_itself_needs_no_other_file(tmp_path):
    model = make("ticket")
    model.save_ticket(tmp_path / "ticket")
    path = (tmp_path / "ticket" / "mask.safetensors").rename(tmp_path / "mask.safetensors")
    for text in (None, '{"model_type": "bert", "hidden_size": 7}'):  # of whatever else is in the folder
        if text:
            (tmp_path / "config.json").write_text(text)
        assert torch.equal(logits_of(SupermaskGPT2LMHeadModel.from_pretrained(path)), logits_of(model))
        model.load_mask(path, f"from {text}")
    with pytest.raises(TicketError, match=r"made for .* but config.json says"):
        SupermaskGPT2LMHeadModel.from_pretrained(tmp_path)


def test_what_is_offloaded_cannot_be_saved_or_switched(tmp_path):
    make("ticket").save_pretrained(tmp_path / "model")
    modules = ["wte", "wpe", "drop", "h.0", "ln_f", "h.1"]
    device_map = {f"transformer.{name}": "disk" if name == "h.1" else "cpu" for name in modules}
    options = {"device_map": {**device_map, "lm_head": "cpu"}, "offload_folder": tmp_path / "offload"}
    placed = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    with pytest.raises(SLTError, match=r"h\.1.* offloaded; .*without a device_map"):
        placed.save_ticket(tmp_path / "again")
    with pytest.raises(SLTError, match=r"h\.1.* offloaded"):
        placed.set_mask(None)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_load_checkpoint_and_dispatch(tmp_path, include_buffers):
    """Of scores. A ticket's file holds no weights, so only `from_pretrained` can load one."""
    model = make()
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
        ({"n_layer": 1}, r"h\.1\.attn\.c_attn\.key is not a tensor of such a model"),
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

    for name in ("draw", "draw_in_pieces"):
        count(TensorSpec, name, lambda spec, *_: spec.name)
    count(format, "load", lambda data: "mask file read")
    count(format, "decode_file", lambda *_: "decoded")
    for module in (format, modeling):
        count(module, "digest", lambda array: f"{array.dtype} hashed")
    count(
        codes, "little_endian", lambda piece: "drawn weights hashed"
    )  # the tensors here are of one piece each
    return done


@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_a_ticket_is_read_hashed_and_drawn_once(tmp_path, work, encoding):
    model = make(embedding="trained")
    masks, names = len(model.mask_arrays()), {*model.mask_arrays()}
    model.save_ticket(tmp_path, encoding=encoding)
    work.clear()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = {"mask file read": 1, "uint8 hashed": masks, "float32 hashed": 2, "drawn weights hashed": masks}
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


@these_cases("normal", "constant-frozen-untied")
def test_replicas_of_data_parallel_draw_nothing(changes, monkeypatch):
    """On each device: buffers are copies, parameters are plain tensors that lead back to the model's."""
    model = make(**changes)
    for name in ("draw", "draw_in_pieces"):
        monkeypatch.setattr(TensorSpec, name, lambda spec, *_: pytest.fail(f"{spec.name} is drawn again"))
    seen = set()
    for path, module in model.named_modules():
        if not isinstance(module, MaskedModule):
            continue
        inputs = torch.arange(5) if isinstance(module, nn.Embedding) else torch.randn(5, inputs_of(module))
        output = module(inputs).detach()
        replica = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, parameter.clone())
        for name, buffer in module.named_buffers(recurse=False):
            replica._buffers[name] = buffer.clone()
        found = replica(inputs)
        assert torch.equal(found, output), path
        if list(module.parameters()):
            found.sum().backward()
            assert all(parameter.grad is not None for parameter in module.parameters())
            seen.add(type(module).__name__)
    assert seen >= {"Conv1D"}


def inputs_of(module) -> int:
    """The width of what a stock layer takes."""
    shape = module.weight.shape
    return shape[0] if type(module).__name__ in ("Conv1D", "LayerNorm") else shape[1]


@both_states
@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit", "quantization_config"])
def test_rounding_on_loading_is_refused_with_the_way_to_do_it(tmp_path, state, option):
    make(state).save_pretrained(tmp_path)
    value = {"load_in_8bit": True} if option == "quantization_config" else True
    for auto in (AutoModelForCausalLM, SupermaskGPT2LMHeadModel):
        with pytest.raises(SLTError, match=f"^{option}: .*slt merge {tmp_path} OUT"):
            auto.from_pretrained(tmp_path, **{option: value})


@pytest.mark.parametrize("way", ["config", "stock config", "llama"])
def test_a_small_vocabulary_has_no_foreign_tokens_and_no_warnings(tmp_path, way, capfd):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16}
    config = {
        "config": lambda: SupermaskGPT2Config(**sizes, vocab_size=64),
        "stock config": lambda: supermask_config(GPT2Config(**sizes, vocab_size=64)),
        "llama": lambda: supermask_config(
            LlamaConfig(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=64,
            )
        ),
    }[way]()
    ids = (1, 2) if way == "llama" else (None, None)
    assert (config.bos_token_id, config.eos_token_id) == ids
    AutoModelForCausalLM.from_config(config).save_ticket(tmp_path)
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path)
    ticket.merge_and_unload().save_pretrained(tmp_path / "stock")
    ticket.generate(IDS[:, :4], max_new_tokens=2)
    verify_ticket(tmp_path)
    assert "token_id" not in capfd.readouterr().err
    # What is given is kept, and so is what fits.
    assert SupermaskGPT2Config(**sizes, vocab_size=64, eos_token_id=63).eos_token_id == 63
    assert SupermaskGPT2Config(**sizes, vocab_size=50257).eos_token_id == 50256


def test_what_verify_ticket_returns_is_short_and_safe(tmp_path):
    make("ticket", density=0.25).save_pretrained(tmp_path)
    header = verify_ticket(tmp_path)
    lines = repr(header).splitlines()
    assert len(lines) <= 9
    assert max(map(len, lines)) < 90
    assert header.digest in lines[-1]
    assert any(line.split() == ["rule", "edge_popup,", "density", "0.25"] for line in lines)
    page = header._repr_html_()
    assert page.count("<tr>") == len(lines) - 1
    shown = sum(entry.size for entry in header.tensors.values())
    assert f"{shown:,}" in repr(header)
    assert f"{shown:,}" in page
    odd = replace(header, config={**header.config, "model_type": "<b>\x1b[2J"})
    assert "<b>" not in odd._repr_html_()
    assert "\x1b" not in repr(odd) + odd._repr_html_()
