"""`generate` and `pipeline`, in all their ways: the tokens of stock GPT-2 with the merged weights."""

import pytest
import torch
from cases import IDS, both_states, make, these_cases
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast, pipeline, set_seed

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
@pytest.mark.parametrize("use_cache", [True, False])
def test_past_the_last_position_as_stock(state, use_cache):
    """GPT-2 has no position there and says so."""
    ids, model = torch.arange(60).view(1, 60), make(state)
    for one in (model, model.merge_and_unload()):
        options = {"use_cache": use_cache, "do_sample": False, "eos_token_id": None}
        assert one.generate(ids, max_new_tokens=4, **options).shape == (1, 64)
        with pytest.raises(IndexError, match="out of range"):
            one.generate(ids, max_new_tokens=6, **options)


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
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": make(seed=8, n_layer=1)}):
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
@these_cases("xavier-free_heads", "uniform-no_norm", "theory")
def test_generate_where_stock_has_no_such_model(state, changes):
    model = make(state, **changes)
    for way in ("greedy", "beams"):
        uncached = generated(model, GENERATIONS[f"{way}-uncached"])
        assert torch.equal(generated(model, GENERATIONS[f"{way}-static"]), uncached)
    assert torch.equal(generated(model, GREEDY), generated(model, GENERATIONS["greedy-uncached"]))


@both_states
def test_pipeline(tmp_path, state):
    words = [f"w{index}" for index in range(62)] + ["<end>", "<pad>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", bos_token="<end>", padding_side="left"
    )
    model = make(state)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = ["w1 w2 w3", "w9", "w4 w5 w6 w7"]
    found = pipeline("text-generation", model=str(tmp_path), batch_size=3)(prompts, **GREEDY)
    stock = pipeline("text-generation", model=model.merge_and_unload(), tokenizer=tokenizer)
    assert found == stock(prompts, **GREEDY)
    assert [answer[0]["generated_text"].count("w") for answer in found] == [15, 13, 16]
