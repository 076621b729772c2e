"""All that is done with a GPT-2 works here, and gives what stock GPT-2 with the merged weights gives."""

import copy
import io
import json
import time

import accelerate
import numpy as np
import pytest
import torch
from cases import (
    CASES,
    every_case,
    logits_of,
    mergeable,
    mergeable_cases,
    tiny_batch,
    tiny_config,
    train_a_little,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

import hf_slt
from hf_slt import SupermaskGPT2ForSequenceClassification, SupermaskGPT2LMHeadModel, SupermaskGPT2Model
from hf_slt.model.layers import SupermaskLayer

IDS = tiny_batch()
CLASSES = (SupermaskGPT2Model, SupermaskGPT2LMHeadModel, SupermaskGPT2ForSequenceClassification)
both_states = pytest.mark.parametrize("state", ["scores", "ticket"])


def make(state: str = "scores", model_class=SupermaskGPT2LMHeadModel, **changes):
    """A tiny model whose masks were learned, in either state."""
    model = train_a_little(model_class(tiny_config(**changes)))
    return model if state == "scores" else model.to_ticket()


def layers(model) -> dict[str, SupermaskLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SupermaskLayer)}


def learned(model) -> dict[str, torch.Tensor]:
    """Scores, masks and trained embeddings: all that a file holds."""
    return {name: values.detach().clone() for name, values in model.state_dict().items()}


def assert_same_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name


def assert_equals_stock(found: torch.Tensor, model) -> None:
    """Logits that are those of stock GPT-2 with the merged weights of `model`."""
    stock = model.merge_and_unload()
    assert type(stock) is GPT2LMHeadModel
    assert not layers(stock)
    assert_close(found, logits_of(stock), rtol=1e-5, atol=1e-5)


# -- what is learned --------------------------------------------------------------------------------


@every_case
def test_only_scores_and_trained_embeddings_are_learned(changes):
    model = AutoModelForCausalLM.from_config(tiny_config(**changes))
    assert type(model) is SupermaskGPT2LMHeadModel
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    embeddings = {"transformer.wte.weight", "transformer.wpe.weight"}
    if not changes.get("tie_word_embeddings", True):
        embeddings.add("lm_head.weight")
    blocks = {name for name in trainable if name.startswith("transformer.h.")}
    assert len(blocks) == 2 * 6
    assert all(name.endswith("scores") for name in blocks)
    learns = changes.get("embedding", "masked")
    expected = {
        "masked": {name.replace("weight", "scores") for name in embeddings},
        "frozen": set(),
        "trained": embeddings,
    }
    assert trainable - blocks == expected[learns]
    # The frozen weights, and no other tensor, stay out of what DDP sends round.
    frozen = {name for name, _ in model.named_buffers()}
    assert frozen == {f"{name}.weight" for name in layers(model)} - (
        embeddings if learns == "trained" else set()
    )
    assert set(model._ddp_params_and_buffers_to_ignore) == frozen
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first = learned(model)
    train_a_little(model)
    assert_same_values(dict(model.named_buffers()), before)
    assert not [name for name, values in learned(model).items() if torch.equal(values, first[name])]
    assert not [name for name, parameter in model.to_ticket().named_parameters() if parameter.requires_grad]


def test_tied_embedding_is_masked_once_for_both_uses():
    tied, untied = make(), make(tie_word_embeddings=False)
    assert "lm_head" not in str(tied.state_dict().keys())
    hidden = torch.randn(1, 1, 32)
    assert torch.equal(
        tied.transformer.wte(hidden, unembed=True)[0, 0], tied.transformer.wte.masked_weight() @ hidden[0, 0]
    )
    assert not torch.equal(untied.lm_head.masked_weight(), untied.transformer.wte.masked_weight())
    assert (untied.merge_and_unload().lm_head.weight == untied.lm_head.masked_weight()).all()


# -- stock GPT-2 ------------------------------------------------------------------------------------


@both_states
@mergeable_cases
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_loss_and_gradients_equal_stock(changes, state, attention):
    model = make(state, **changes)
    model.set_attn_implementation(attention)
    stock = model.merge_and_unload()
    assert stock.config._attn_implementation == attention
    options = {"labels": IDS, "attention_mask": torch.ones_like(IDS).index_fill_(1, torch.arange(4), 0)}
    ours, theirs = model(IDS, **options), stock(IDS, **options)
    assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
    if state == "ticket":
        return
    ours.loss.backward()
    theirs.loss.backward()
    # The straight-through gradient of a score is that of its weight, times weight and sign.
    for name, layer in layers(model).items():
        gradient = stock.get_parameter(f"{name}.weight").grad
        if layer.learns == "trained":
            assert_close(layer.weight.grad, gradient, rtol=1e-4, atol=1e-6)
        for part in layer.parts if layer.learns == "scores" else ():
            scores = getattr(layer, f"{part.prefix}scores")
            expected = (gradient * layer.weight)[:, part.columns] * scores.sign()
            assert_close(scores.grad, expected, rtol=1e-4, atol=1e-6)


@both_states
def test_eager_and_sdpa_agree_and_attentions_equal_stock(state):
    model = make(state)
    model.set_attn_implementation("sdpa")
    fast = logits_of(model)
    model.set_attn_implementation("eager")
    assert_close(fast, logits_of(model), rtol=1e-5, atol=1e-5)
    found = model(IDS, output_attentions=True, output_hidden_states=True)
    expected = model.merge_and_unload()(IDS, output_attentions=True, output_hidden_states=True)
    assert len(found.attentions) == 2
    assert_close(found.attentions, expected.attentions, rtol=1e-5, atol=1e-6)
    assert_close(found.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"activation_function": "relu"},
        {"n_inner": 48},
        {"qk_scale": 0.5},
        {"layer_norm_epsilon": 0.1},
        {"embedding_law": "signed_constant", "embedding_range": 0.01},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_gpt2_equal_stock(options):
    model = make(**options)
    assert_equals_stock(logits_of(model), model)
    assert not torch.allclose(logits_of(model), logits_of(make()))


@pytest.mark.parametrize("model_class", CLASSES)
def test_each_class_merges_to_its_stock_class(model_class):
    stock_classes = (GPT2Model, GPT2LMHeadModel, GPT2ForSequenceClassification)
    model = make(model_class=model_class, num_labels=3)
    stock = model.merge_and_unload()
    assert type(stock) is stock_classes[CLASSES.index(model_class)]
    assert_close(logits_of(model), logits_of(stock), rtol=1e-5, atol=1e-5)


def test_merged_model_survives_a_save(tmp_path):
    model = make()
    model.merge_and_unload().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is GPT2LMHeadModel
    assert_equals_stock(logits_of(again), model)


@pytest.mark.parametrize("changes", [CASES[name] for name in CASES if not mergeable(CASES[name])])
def test_merge_refuses_what_stock_has_not(changes):
    with pytest.raises(ValueError, match="cannot be merged"):
        make(**changes).merge_and_unload()


# -- files ------------------------------------------------------------------------------------------


@every_case
def test_scores_are_saved_and_resumed(tmp_path, changes):
    model = make(**changes)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is hf_slt.SupermaskGPT2Config
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_values(learned(again), learned(model))
    assert torch.equal(logits_of(again), logits_of(model))
    assert {name for name, p in again.named_parameters() if p.requires_grad} == set(learned(model))
    # What is learned from there on is the same too.
    assert_same_values(learned(train_a_little(again)), learned(train_a_little(model)))


@every_case
def test_ticket_is_saved_and_loaded(tmp_path, changes):
    model = make(**changes)
    expected = logits_of(model)
    model.save_ticket(tmp_path / "ticket")
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert ticket.config.state == "ticket"
    assert torch.equal(logits_of(ticket), expected)
    assert torch.equal(logits_of(model.to_ticket()), expected)
    assert not [name for name, parameter in ticket.named_parameters() if parameter.requires_grad]
    if mergeable(changes):
        assert_equals_stock(expected, ticket)
    # Saved again, by either name, it is the same ticket.
    header = hf_slt.verify_ticket(tmp_path / "ticket")
    for save, folder in (
        (ticket.save_pretrained, tmp_path / "pretrained"),
        (ticket.save_ticket, tmp_path / "again"),
    ):
        save(folder)
        assert hf_slt.verify_ticket(folder).tensors == header.tensors
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(folder)), expected)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
@both_states
def test_sharded_save(tmp_path, changes, state):
    model = make(state, **changes)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_values(learned(again), learned(model))
    assert torch.equal(logits_of(again), logits_of(model))
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 if state == "scores" else not shards  # a ticket is small: one file
    # A smaller save into the same folder leaves no shard behind.
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}


@both_states
def test_bare_model_and_language_model_load_each_other(tmp_path, state):
    model = make(state)
    model.save_pretrained(tmp_path / "lm")
    bare = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(bare) is SupermaskGPT2Model
    assert torch.equal(logits_of(bare), model.transformer(IDS).last_hidden_state)
    bare.save_pretrained(tmp_path / "bare")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "bare")), logits_of(model))


@both_states
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_map(tmp_path, state, device_map):
    model = make(state)
    model.save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(logits_of(placed), logits_of(model))
    assert_equals_stock(logits_of(placed), model)


@both_states
@pytest.mark.parametrize("changes", [{}, CASES["xavier-trained-untied"]], ids=["tied", "trained-untied"])
def test_disk_offload(tmp_path, state, changes):
    model = make(state, **changes)
    model.save_pretrained(tmp_path / "model")
    device_map = {"transformer.wpe": "disk", "transformer.h.1": "disk"}
    device_map |= dict.fromkeys(
        ["transformer.wte", "transformer.h.0", "transformer.drop", "transformer.ln_f"], "cpu"
    )
    if "tie_word_embeddings" in changes:
        device_map["lm_head"] = "disk"
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
    device_map = {f"transformer.{name}": "disk" if name == "h.1" else "cpu" for name in modules}
    with pytest.raises(RuntimeError, match=r"h\.1.* offload_buffers=False"):
        logits_of(
            AutoModelForCausalLM.from_pretrained(
                tmp_path / "model",
                device_map=device_map,
                offload_folder=tmp_path / "offload",
                offload_buffers=True,
            )
        )


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


# -- dtypes -----------------------------------------------------------------------------------------


@both_states
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_half_precision(tmp_path, state, dtype, changes):
    model = make(state, **changes)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert half.dtype == dtype
    assert_same_values(learned(half), learned(model))  # scores stay float32
    stock = model.merge_and_unload().to(dtype)
    found, expected = half(IDS, labels=IDS), stock(IDS, labels=IDS)
    assert found.logits.dtype == dtype
    assert_close(found.logits, expected.logits, rtol=0.02, atol=0.02)
    assert_close(found.loss.float(), expected.loss.float(), rtol=0.01, atol=0)
    cast = copy.deepcopy(model).to(dtype)
    assert_same_values(learned(cast), learned(model))
    assert torch.equal(logits_of(cast), logits_of(half))
    half.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == dtype


# A trained embedding is an ordinary parameter: it is rounded, as everywhere.
@both_states
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].get("embedding") != "trained"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cast_to_half_and_back_loses_nothing(name, state, dtype):
    model = make(state, **CASES[name])
    expected, values = logits_of(model), learned(model)
    model.to(dtype)
    assert_same_values(learned(model), values)
    model.float()
    assert_same_values(learned(model), values)
    assert torch.equal(logits_of(model), expected)


def test_training_in_bfloat16_moves_float32_scores():
    model = make().to(torch.bfloat16).train()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    reference = make().train()
    reference(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        close = torch.nn.functional.cosine_similarity(
            parameter.grad.flatten(), reference.get_parameter(name).grad.flatten(), 0
        )
        assert close > 0.99, name


def test_gradients_survive_a_cast():
    model = make().train()
    model(IDS, labels=IDS).loss.backward()
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = learned(model)
    optimizer.step()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert not any(torch.equal(values, before[name]) for name, values in learned(model).items())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_autocast(changes):
    model = make(**changes).train()
    stock = model.merge_and_unload()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(IDS, labels=IDS), stock(IDS, labels=IDS)
    assert_close(found.logits, expected.logits, rtol=0.02, atol=0.02)
    found.loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


# -- generate ---------------------------------------------------------------------------------------

PADDED = IDS.clone()
PADDED[0, :5] = 63
PADDED[1, :2] = 63
ATTENTION = (PADDED != 63).long()
GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
GENERATIONS = {
    "greedy": GREEDY,
    "greedy-static": GREEDY | {"cache_implementation": "static"},
    "greedy-uncached": GREEDY | {"use_cache": False},
    "sampling": GREEDY | {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "sampling-static": GREEDY | {"do_sample": True, "top_k": 20, "cache_implementation": "static"},
    "beams": GREEDY | {"num_beams": 3, "num_return_sequences": 2},
    "beams-static": GREEDY | {"num_beams": 3, "cache_implementation": "static"},
    "beams-uncached": GREEDY | {"num_beams": 3, "use_cache": False},
}


def generated(model, options: dict, ids=PADDED, attention=ATTENTION):
    set_seed(5)
    return model.generate(ids, attention_mask=attention, **options)


@both_states
@pytest.mark.parametrize("options", GENERATIONS.values(), ids=GENERATIONS.keys())
def test_generate_equals_stock(state, options):
    model = make(state)
    found = generated(model, options)
    assert torch.equal(found, generated(model.merge_and_unload(), options))
    assert found.shape[1] == IDS.shape[1] + 12
    assert len({tuple(row) for row in found[:, IDS.shape[1] :].tolist()}) > 1  # they do not all say one thing


@both_states
def test_generate_by_other_ways_equals_stock(state):
    model = make(state)
    stock = model.merge_and_unload()
    expected = generated(stock, GREEDY)
    one = IDS[:1]
    alone = generated(stock, GREEDY, one, torch.ones_like(one))
    # Guessed ahead, from the prompt or by another model: rejected guesses are cut off the cache.
    guessing = {"prompt_lookup_num_tokens": 3}, {"assistant_model": make(seed=8, n_layer=1)}
    for options in guessing:
        assert torch.equal(generated(model, GREEDY | options, one, torch.ones_like(one)), alone)
    # From embeddings, and from a cache.
    embeddings = model.get_input_embeddings()(PADDED)
    found = model.generate(inputs_embeds=embeddings, attention_mask=ATTENTION, **GREEDY)
    assert torch.equal(found, expected[:, -12:])
    cache = model(IDS[:, :-1], use_cache=True).past_key_values
    found = model.generate(IDS, past_key_values=cache, **GREEDY)
    assert torch.equal(found, stock.generate(IDS, **GREEDY))
    # With all that it saw on the way.
    wanted = GREEDY | dict.fromkeys(
        ["return_dict_in_generate", "output_logits", "output_attentions", "output_hidden_states"], True
    )
    for each in (model, stock):
        each.set_attn_implementation("eager")
    found, expected = generated(model, wanted), generated(stock, wanted)
    assert torch.equal(found.sequences, expected.sequences)
    for field in ("logits", "attentions", "hidden_states"):
        assert len(found[field]) == 12
        assert_close(found[field], expected[field], rtol=1e-4, atol=1e-5)


@both_states
def test_left_padding_changes_nothing(state):
    model = make(state)
    together = generated(model, GREEDY)
    for row, ids in enumerate(PADDED):
        alone = ids[ids != 63][None]
        expected = generated(model, GREEDY, alone, torch.ones_like(alone))
        assert torch.equal(together[row, -12:], expected[0, -12:])


@both_states
@pytest.mark.parametrize("name", ["xavier-free_heads", "uniform-no_norm", "theory"])
def test_generate_where_stock_has_no_such_model(state, name):
    model = make(state, **CASES[name])
    uncached = generated(model, GENERATIONS["greedy-uncached"])
    for cached in ("greedy", "greedy-static"):
        assert torch.equal(generated(model, GENERATIONS[cached]), uncached), cached
    assert torch.equal(
        generated(model, GENERATIONS["beams-static"]), generated(model, GENERATIONS["beams-uncached"])
    )


@both_states
def test_free_head_widths_in_the_cache(state):
    model = make(state, n_qk=6, n_v=10)
    model.set_attn_implementation("sdpa")
    fast = logits_of(model)
    model.set_attn_implementation("eager")
    assert_close(logits_of(model), fast, rtol=1e-5, atol=1e-5)
    start = model(IDS[:, :8], use_cache=True)
    assert start.past_key_values.layers[0].keys.shape == (3, 4, 8, 6)
    assert start.past_key_values.layers[0].values.shape == (3, 4, 8, 10)
    rest = model(IDS[:, 8:], past_key_values=start.past_key_values)
    assert_close(torch.cat([start.logits, rest.logits], 1), fast, rtol=1e-5, atol=1e-5)


def test_head_widths_equal_to_the_usual_ones_change_nothing():
    assert torch.equal(logits_of(make(n_qk=8, n_v=8)), logits_of(make()))


def test_attention_of_free_head_widths_by_hand():
    attention = make(n_qk=3, n_v=5).transformer.h[0].attn
    hidden = torch.randn(1, 6, 32)
    query, key, value = (hidden[0] @ attention.c_attn.masked_weight()).split([12, 12, 20], -1)
    heads = []
    for head in range(4):
        q, k, v = (part[:, head * n : head * n + n] for part, n in ((query, 3), (key, 3), (value, 5)))
        causal = torch.full((6, 6), -torch.inf).triu(1)
        heads.append(((q @ k.T) / 3**0.5 + causal).softmax(-1) @ v)
    expected = torch.cat(heads, -1) @ attention.c_proj.masked_weight()
    attention.config._attn_implementation = "sdpa"
    assert_close(attention(hidden)[0][0], expected, rtol=1e-5, atol=1e-5)


def test_positions_types_and_embeddings_as_input():
    model = make()
    stock = model.merge_and_unload()
    embeddings = torch.randn(2, 5, 32)
    for options in (
        {"inputs_embeds": embeddings},
        {"input_ids": IDS, "position_ids": torch.arange(30, 42)[None]},
        {"input_ids": IDS, "token_type_ids": IDS % 3},
        {"input_ids": IDS, "logits_to_keep": 2},
        {"input_ids": IDS, "return_dict": False, "use_cache": False},
    ):
        assert_close(model(**options)[0], stock(**options)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()


@both_states
def test_pipeline(tmp_path, state):
    words = [f"w{index}" for index in range(62)] + ["<end>", "<pad>"]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<end>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", bos_token="<end>", padding_side="left"
    )
    model = make(state)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = ["w1 w2 w3", "w9", "w4 w5 w6 w7"]
    found = pipeline("text-generation", model=str(tmp_path), batch_size=3)(prompts, **GREEDY)
    stock = pipeline("text-generation", model=model.merge_and_unload(), tokenizer=tokenizer)(
        prompts, **GREEDY
    )
    assert found == stock
    assert [answer[0]["generated_text"].count("w") for answer in found] == [15, 13, 16]


def test_a_ticket_draws_its_weight_once(tmp_path, monkeypatch):
    make().save_ticket(tmp_path)
    drawn = []
    draw = hf_slt.model.layers.draw
    monkeypatch.setattr(
        hf_slt.model.layers, "draw", lambda seed, name, *rest: drawn.append(name) or draw(seed, name, *rest)
    )
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sorted(drawn) == sorted(part.name for layer in layers(ticket).values() for part in layer.parts)
    drawn.clear()
    generated(ticket, GREEDY)
    logits_of(ticket)
    with torch.inference_mode():
        logits_of(ticket)
    assert not drawn


@pytest.mark.slow
def test_a_ticket_is_as_fast_as_stock():
    shape = {"n_embd": 256, "n_layer": 4, "vocab_size": 512, "n_positions": 128}
    ticket = SupermaskGPT2LMHeadModel(tiny_config(state="ticket", **shape)).eval()
    stock = ticket.merge_and_unload()
    times = {ticket: [], stock: []}
    ids = tiny_batch(4, 128)
    for _ in range(10):
        for model, record in times.items():
            start = time.perf_counter()
            logits_of(model, ids)
            record.append(time.perf_counter() - start)
    assert min(times[ticket]) < 1.25 * min(times[stock])


# -- training ---------------------------------------------------------------------------------------


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    """Rows of unlike many labels, so that a mean of means is not the mean."""
    examples = []
    for index, ids in enumerate(tiny_batch(count, 12, seed=3)):
        labels = ids.clone()
        labels[: index % 5 * 2] = -100
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def trainer(folder, model, **options) -> Trainer:
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
    return Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(4))


def test_trainer_moves_scores_only_and_learns(tmp_path):
    model = SupermaskGPT2LMHeadModel(tiny_config())
    frozen = {name: buffer.clone() for name, buffer in model.named_buffers()}
    scores = learned(model)
    run = trainer(tmp_path, model, max_steps=12)
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
    run = trainer(
        tmp_path,
        model,
        learning_rate=0.0,
        max_steps=1,
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=1e9,
    )
    run.train()
    batch = {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    stock = model.merge_and_unload()
    loss = stock(**batch).loss.item()
    log = next(entry for entry in run.state.log_history if "grad_norm" in entry)
    assert log["loss"] == pytest.approx(loss, rel=1e-3)  # the log is rounded
    model.zero_grad()
    model(**batch).loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    assert log["grad_norm"] == pytest.approx(norm, rel=1e-3)
    dense = copy.deepcopy(stock)
    dense.loss_type = model.loss_type
    dense_run = trainer(
        tmp_path, dense, learning_rate=0.0, max_steps=1, per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    dense_run.train()
    assert dense_run.state.log_history[0]["loss"] == pytest.approx(log["loss"], abs=2e-4)


@pytest.mark.parametrize("changes", [{}, CASES["xavier-trained-untied"]], ids=["masked", "trained-untied"])
def test_trainer_resumes_bit_for_bit(tmp_path, changes):
    straight = trainer(tmp_path / "straight", SupermaskGPT2LMHeadModel(tiny_config(**changes)))
    straight.train()
    cut = trainer(
        tmp_path / "cut",
        SupermaskGPT2LMHeadModel(tiny_config(**changes)),
        save_strategy="steps",
        save_steps=2,
    )
    cut.train()
    resumed = trainer(tmp_path / "cut", SupermaskGPT2LMHeadModel(tiny_config(seed=7, **changes)))
    with torch.no_grad():  # nothing of the first scores may be left after the load
        for parameter in resumed.model.parameters():
            parameter.normal_()
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert_same_values(learned(resumed.model), learned(straight.model))
    assert_same_values(learned(cut.model), learned(straight.model))


def test_trainer_loads_the_best_model_at_the_end(tmp_path):
    run = trainer(
        tmp_path,
        SupermaskGPT2LMHeadModel(tiny_config()),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the "best" is then not the last
    )
    run.train()
    best = run.state.best_model_checkpoint
    assert not best.endswith("-4")
    saved = AutoModelForCausalLM.from_pretrained(best)
    assert_same_values(learned(run.model), learned(saved))
    assert torch.equal(logits_of(run.model), logits_of(saved))
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not torch.equal(logits_of(last), logits_of(saved))


def gradients(model, **batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    batch = batch or {"input_ids": IDS, "labels": IDS}
    model(**batch, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, CASES["normal-trained"], CASES["theory"]], ids=["masked", "trained", "theory"]
)
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
    plain = trainer(tmp_path, SupermaskGPT2LMHeadModel(tiny_config()))
    plain.train()
    spared = trainer(tmp_path, SupermaskGPT2LMHeadModel(tiny_config()), gradient_checkpointing=True)
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


# -- compile, export, torch.func ----------------------------------------------------------------------


def check_compiled_training(backend: str, **changes) -> None:
    eager, compiled = (SupermaskGPT2LMHeadModel(tiny_config(n_layer=1, **changes)).train() for _ in range(2))
    step = torch.compile(compiled, fullgraph=True, backend=backend)
    exact = {"rtol": 0, "atol": 0} if backend != "inductor" else {"rtol": 1e-4, "atol": 1e-6}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (eager, compiled)]
    torch.compiler.reset()
    for index in range(3):
        batch = tiny_batch(seed=index)
        masks = eager.masks()
        losses = [model(batch, labels=batch).loss for model in (eager, step)]
        assert_close(losses[1], losses[0], **exact)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for name, parameter in eager.named_parameters():
            assert_close(compiled.get_parameter(name).grad, parameter.grad, **exact)
        for ours, theirs in zip(eager.parameters(), compiled.parameters(), strict=True):
            theirs.grad.copy_(ours.grad)  # a rounding must not become another mask
        for optimizer in optimizers:
            optimizer.step()
        moved = eager.masks()
        assert all((moved[name] != masks[name]).any() for name in masks)


def test_compiled_training_step():
    check_compiled_training("aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal-untied", "normal-trained", "uniform-no_norm", "xavier-free_heads"])
def test_compiled_training_step_of_cases(name):
    check_compiled_training("aot_eager", **CASES[name])


@pytest.mark.slow
def test_compiled_training_step_by_inductor():
    check_compiled_training("inductor")


@both_states
def test_compiled_forward(state):
    model = make(state, n_layer=1)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(logits_of(compiled), logits_of(model), rtol=0, atol=0)
    assert_equals_stock(logits_of(compiled), model)


@pytest.mark.slow
@both_states
def test_compiled_forward_by_inductor(state):
    model = make(state, n_layer=1)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert_equals_stock(logits_of(compiled), model)


@pytest.mark.slow
def test_compiled_generation_with_a_static_cache():
    ticket = make("ticket", n_layer=1)
    expected = generated(ticket.merge_and_unload(), GENERATIONS["greedy-static"])
    torch.compiler.reset()
    ticket.forward = torch.compile(ticket.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(generated(ticket, GENERATIONS["greedy-static"]), expected)


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
    for exported in (program.module(), torch.export.load(buffer).module()):
        assert_equals_stock(exported(input_ids=IDS, use_cache=False).logits, ticket)
        other = tiny_batch(3, 7, seed=9)
        found = exported(input_ids=other, use_cache=False).logits
        assert_close(found, logits_of(ticket, other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, CASES["normal-untied"], CASES["normal-trained"]], ids=["tied", "untied", "trained"]
)
def test_torch_func(changes):
    model = make(**changes).train()
    expected = gradients(model)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss(values, ids):
        return torch.func.functional_call(model, values, (ids,), {"labels": ids, "use_cache": False}).loss

    found = torch.func.grad(loss)(values, IDS)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    # Several models at once: the masks of each are its own.
    others = [
        values,
        {name: one.flip(0) for name, one in values.items()},
        {name: -one * 2 for name, one in values.items()},
    ]
    stacked = {name: torch.stack([other[name] for other in others]) for name in values}
    together = torch.func.vmap(torch.func.grad_and_value(loss), (0, None))(stacked, IDS)
    for index, other in enumerate(others):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(other[name])
        alone = gradients(model)
        assert_close(together[1][index], model(IDS, labels=IDS).loss, rtol=1e-5, atol=1e-6)
        for name, gradient in alone.items():
            assert_close(together[0][name][index], gradient, rtol=1e-4, atol=1e-6)


def test_forward_derivative_is_that_of_the_gradient():
    model = make().train()
    expected = gradients(model)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    direction = {name: torch.randn_like(value) for name, value in values.items()}

    def loss(values):
        return torch.func.functional_call(model, values, (IDS,), {"labels": IDS, "use_cache": False}).loss

    model.set_attn_implementation("eager")
    _, slope = torch.func.jvp(loss, (values,), (direction,))
    along = sum((expected[name] * direction[name]).sum() for name in values)
    assert_close(slope, along, rtol=1e-3, atol=1e-5)


def test_per_sample_gradients():
    model = make(pad_token_id=None).train()  # else transformers looks for padding, which vmap cannot
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values, ids):
        batch = {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        return torch.func.functional_call(model, values, (), batch).loss

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, IDS)
    for index, ids in enumerate(IDS):
        for name, gradient in gradients(model, input_ids=ids[None], labels=ids[None]).items():
            assert_close(found[name][index], gradient, rtol=1e-4, atol=1e-6)


# -- copies and state dicts ---------------------------------------------------------------------------


@both_states
@every_case
def test_copies(changes, state):
    model = make(state, **changes)
    expected = logits_of(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert_same_values(learned(twin), learned(model))
        assert torch.equal(logits_of(twin), expected)
        if state == "scores":  # and is a model of its own
            train_a_little(twin)
            assert not torch.equal(logits_of(twin), expected)
    assert torch.equal(logits_of(model), expected)


@both_states
@pytest.mark.parametrize(
    ("name", "assign"),
    [
        *((name, True) for name in CASES),
        ("normal", False),
        ("xavier-trained-untied", False),
        ("theory", False),
    ],
)
def test_load_state_dict(name, state, assign):
    changes = CASES[name]
    model = make(state, **changes)
    other = SupermaskGPT2LMHeadModel(tiny_config(state=state, **changes)).eval()
    before = logits_of(other)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    assert_same_values(learned(other), learned(model))
    assert torch.equal(logits_of(other), logits_of(model))
    assert not torch.equal(logits_of(other), before)
    if state == "scores":
        assert_same_values(learned(train_a_little(other)), learned(train_a_little(model)))


@both_states
@pytest.mark.parametrize(
    ("model_class", "changes"),
    [(model_class, {}) for model_class in CLASSES]
    + [
        (SupermaskGPT2LMHeadModel, CASES[name])
        for name in ("constant-frozen", "xavier-trained-untied", "theory")
    ],
)
def test_meta_then_empty_then_init_is_a_normal_model(changes, state, model_class):
    config = tiny_config(state=state, **changes)
    normal = model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for values in (*model.parameters(), *model.buffers()):  # what an allocator may leave behind
        with torch.no_grad():
            values.fill_(3)
    model.init_weights()
    assert_same_values(learned(model), learned(normal))
    assert_same_values(dict(model.named_buffers()), dict(normal.named_buffers()))
    assert torch.equal(logits_of(model.eval()), logits_of(normal.eval()))


def test_a_global_seed_has_no_say():
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global one is meant
        models.append(make())
    assert_same_values(learned(models[0]), learned(models[1]))


# -- classification -----------------------------------------------------------------------------------


@both_states
def test_sequence_classification(tmp_path, state):
    model = make(state, SupermaskGPT2ForSequenceClassification, num_labels=3)
    assert ("score.scores" if state == "scores" else "score.mask") in model.state_dict()
    mask = model.masks()["score"]
    assert mask.shape == (3, 32)
    assert mask.sum() == 48
    ids = PADDED.flip(1)  # padding on the right
    labels = torch.tensor([0, 2, 1])
    stock = model.merge_and_unload()
    assert type(stock) is GPT2ForSequenceClassification
    for batch in ({"input_ids": ids}, {"input_ids": PADDED, "attention_mask": ATTENTION}):
        found, expected = model(**batch, labels=labels), stock(**batch, labels=labels)
        assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
        assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    assert again.config.num_labels == 3


def test_classifier_learns_through_its_mask_only(tmp_path):
    model = SupermaskGPT2ForSequenceClassification(tiny_config(num_labels=2)).train()
    assert {name.rsplit(".", 1)[-1].removeprefix("query_").removeprefix("key_").removeprefix("value_")
            for name, _ in model.named_parameters()} == {"scores"}  # fmt: skip
    ids = tiny_batch(16, 8)
    labels = (ids[:, -1] > 30).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_new_head_on_a_trained_language_model(tmp_path):
    model = make()
    for save in (model.save_pretrained, model.save_ticket):
        save(tmp_path)
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
        hidden = classifier.transformer(IDS).last_hidden_state
        assert torch.equal(hidden, model.transformer(IDS).last_hidden_state)
        assert classifier.masks()["score"].sum() == 64


# -- resize -------------------------------------------------------------------------------------------


@both_states
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 80) for name in CASES), ("normal", 50), ("normal-untied", 50)]
)
def test_resize_token_embeddings(tmp_path, name, state, rows):
    changes = CASES[name]
    model = make(state, **changes)
    old = {name: (layer, learned(layer)) for name, layer in layers(model).items()}
    embedding = model.resize_token_embeddings(rows)
    assert embedding is model.get_input_embeddings()
    assert model.config.vocab_size == rows
    fresh = SupermaskGPT2LMHeadModel(tiny_config(state=state, **changes | {"vocab_size": rows}))
    both = min(64, rows)
    tables = {"transformer.wte"} | ({"lm_head"} & set(old))
    for name in tables:
        (before, _), table, drawn = old[name], layers(model)[name], layers(fresh)[name]
        assert table.shape == (rows, 32)
        if table.learns in ("scores", "trained"):
            key = "scores" if table.learns == "scores" else "weight"
            assert torch.equal(getattr(table, key)[:both], getattr(before, key)[:both])
            assert torch.equal(getattr(table, key)[both:], getattr(drawn, key)[both:])
            assert getattr(table, key).requires_grad == (state == "scores")
        elif table.learns == "ticket":
            masks = [one.mask_of(one.parts[0]) for one in (table, before, drawn)]
            assert torch.equal(masks[0][:both], masks[1][:both])
            assert torch.equal(masks[0][both:], masks[2][both:])
        if table.learns != "trained":
            assert np.array_equal(table.frozen_weight(table.parts[0]), drawn.frozen_weight(drawn.parts[0]))
    for name, (layer, values) in old.items():
        if name not in tables:
            assert layers(model)[name] is layer
            assert_same_values(learned(layer), values)
    logits = logits_of(model, IDS % 50)
    assert logits.shape[-1] == rows
    assert set(model._ddp_params_and_buffers_to_ignore) == {
        name for name, _ in model.named_buffers() if name.endswith("weight")
    }
    if mergeable(changes):
        assert_close(logits, logits_of(model.merge_and_unload(), IDS % 50), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), IDS % 50), logits)
    # Nor does transformers draw anew what is there.
    model.post_init()
    assert torch.equal(logits_of(model, IDS % 50), logits)


def test_training_goes_on_after_a_resize():
    model = make()
    model.resize_token_embeddings(80)
    before = learned(model)
    train_a_little(model)
    assert not any(torch.equal(values, before[name]) for name, values in learned(model).items())


def test_resize_to_a_multiple():
    model = make()
    model.resize_token_embeddings(65, pad_to_multiple_of=16)
    assert model.config.vocab_size == 80
    assert model.get_input_embeddings().weight.shape == (80, 32)


def test_config_of_a_save_names_the_class(tmp_path):
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "supermask_gpt2"
    assert config["architectures"] == ["SupermaskGPT2LMHeadModel"]
    assert config["state"] == "scores"
