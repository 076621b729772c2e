"""PEFT on a ticket: it sees a stock model, because it is one. The oracle is stock GPT-2 with the merged weights."""

import copy

import architectures
import peft
import pytest
import torch
from cases import IDS, logits_of, make, save_tickets
from peft import LoraConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_slt import SLTError
from hf_slt.text.blocks import train_tokenizer

PRESET = {"scales": "row", "layer_norm": "trained", "rule": "signed", "law": "signed_constant"}


@pytest.fixture
def ticket(tmp_path):
    """As the presets make one, on disk: adapters name the folder of their base model."""
    make("ticket", **PRESET).save_ticket(tmp_path / "ticket", encoding="entropy")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")


def trained(model):
    """A few large steps of what an adapter trains."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def with_lora(model, **options):
    torch.manual_seed(0)
    return trained(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)))


@pytest.mark.parametrize(
    "options",
    [
        {},  # PEFT's own targets, by model_type
        {"target_modules": "all-linear"},
        {"target_modules": ["wte", "c_attn"]},
        {"target_modules": ["c_attn"], "trainable_token_indices": [1, 2]},
    ],
    ids=["default", "all-linear", "table", "tokens"],
)
def test_lora_learns_what_it_learns_on_stock(ticket, options):
    stock = ticket.merge_and_unload().requires_grad_(False)
    expected = logits_of(with_lora(stock, **options))
    found = logits_of(with_lora(ticket, **options))
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    ],
    ids=["prompt_tuning", "p_tuning"],
)
def test_prompts_are_learned(ticket, config):
    before = logits_of(ticket)
    model = trained(get_peft_model(ticket, config))
    assert not torch.equal(model(input_ids=IDS).logits[:, -IDS.shape[1] :], before)


def test_a_prompt_starts_from_a_text_as_on_stock(ticket, tmp_path):
    train_tokenizer(["the cat sat on the mat " * 20], 260, 64).save_pretrained(tmp_path / "tokenizer")
    ticket.resize_token_embeddings(320)
    stock = ticket.merge_and_unload().requires_grad_(False)
    config = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prompt_tuning_init="TEXT",
        prompt_tuning_init_text="the cat", tokenizer_name_or_path=str(tmp_path / "tokenizer"),
    )  # fmt: skip
    prompts, logits = [], []
    for base in (ticket, stock):
        model = get_peft_model(base, copy.deepcopy(config))
        prompts.append(model.get_prompt(1).detach())
        logits.append(trained(model)(input_ids=IDS).logits.detach())
    assert torch.equal(prompts[0], prompts[1])
    assert prompts[0].abs().max() > 0
    assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig])
def test_prompts_learn_with_gradient_checkpointing_what_they_learn_without(ticket, kind):
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    if kind is PromptEncoderConfig:
        options["encoder_hidden_size"] = 16
    logits = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(ticket).train(), kind(**options))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits.append(trained(model)(input_ids=IDS).logits.detach())
    assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def test_a_merged_adapter_survives_a_cast_and_a_move(ticket):
    bare, model = logits_of(ticket), with_lora(ticket, target_modules=["c_attn"])
    expected = logits_of(model)
    assert (expected - bare).abs().max() > 0.5
    merged = model.merge_and_unload()
    assert_close(logits_of(merged), expected, rtol=1e-5, atol=1e-5)
    rounded = logits_of(merged.to(torch.bfloat16))
    assert (rounded - expected).norm() < 0.05 * (bare - expected).norm()


def test_a_merged_adapter_can_be_taken_out_again_after_a_cast(ticket):
    bare, model = logits_of(ticket), with_lora(ticket, target_modules=["c_attn"])
    model.merge_adapter()
    model.double()
    model.unmerge_adapter()
    with model.float().disable_adapter():
        assert_close(logits_of(model), bare, rtol=1e-5, atol=1e-5)


def test_a_merged_adapter_is_not_saved_as_a_ticket(ticket, tmp_path):
    merged = with_lora(ticket, target_modules=["c_attn"]).merge_and_unload()
    with pytest.raises(SLTError, match="adapter was merged"):
        merged.save_ticket(tmp_path / "merged")


def test_an_adapter_is_loaded_by_peft_and_by_the_auto_class(ticket, tmp_path):
    model = with_lora(ticket, target_modules=["c_attn"])
    expected = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # which names the ticket's folder
    assert_close(logits_of(again), expected, rtol=1e-6, atol=1e-6)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert_close(
        logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter")), expected, rtol=1e-6, atol=1e-6
    )


def test_an_adapter_that_was_added_is_what_is_saved(ticket, tmp_path):
    ticket.add_adapter(LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False))
    expected = logits_of(ticket)
    ticket.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    again.load_adapter(tmp_path / "adapter")
    assert_close(logits_of(again), expected, rtol=1e-6, atol=1e-6)


def test_a_new_head_is_trained_beside_an_adapter(ticket, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ticket", num_labels=3)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["c_attn"]))
    head = model.base_model.model.score.modules_to_save["default"].weight
    before = head.detach().clone()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    model(input_ids=IDS, labels=torch.tensor([0, 1, 2])).loss.backward()
    optimizer.step()
    assert not torch.equal(head, before)


def test_what_peft_is_used_for_in_its_own_tests(ticket, tmp_path):
    """The list is that of PEFT's tests/test_decoder_models.py; the oracle is the ticket, or the adapter before."""
    bare, config = logits_of(ticket), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(ticket, config).eval()
    with_one = logits_of(model)
    assert not torch.equal(with_one, bare)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), bare)
    model.add_adapter(
        "two", LoraConfig(task_type="CAUSAL_LM", layers_to_transform=[0], init_lora_weights=False)
    )
    model.set_adapter("two")
    with_two = logits_of(model)
    assert not torch.equal(with_two, with_one)
    rows = torch.cat([IDS[:1], IDS[:1]])
    mixed = model(rows, adapter_names=["default", "__base__"]).logits
    assert_close(mixed, torch.stack([with_one[0], bare[0]]), rtol=1e-5, atol=1e-5)
    model.add_weighted_adapter(["default", "two"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    assert not torch.equal(logits_of(model), with_two)
    model.merge_adapter()
    merged = logits_of(model)
    model.unmerge_adapter()
    assert_close(merged, logits_of(model), rtol=1e-4, atol=1e-4)
    for name in ("sum", "two"):
        model.delete_adapter(name)
    model.set_adapter("default")
    assert_close(logits_of(model), with_one, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "one")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    again = PeftModel.from_pretrained(again, tmp_path / "one", adapter_name="one")
    again.load_adapter(tmp_path / "one", "another")
    assert_close(logits_of(again), with_one, rtol=1e-5, atol=1e-5)
    text = model.generate(input_ids=IDS[:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(text, again.generate(input_ids=IDS[:1], max_new_tokens=4, do_sample=False))
    embedded = model.get_input_embeddings()(IDS)
    assert_close(model(inputs_embeds=embedded).logits, with_one, rtol=1e-5, atol=1e-5)
    plain = gradients_of_adapter(model)
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    checkpointed = gradients_of_adapter(model.train())
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert_close(logits_of(model.unload().eval()), bare, rtol=1e-5, atol=1e-5)  # unmerging has rounded


def gradients_of_adapter(model):
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_masks_are_switched_below_an_adapter(tmp_path):
    expected = save_tickets(tmp_path, ["one", "two"], scales="row", tie_word_embeddings=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    options = {"target_modules": ["c_attn", "wte"], "modules_to_save": ["lm_head"]}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))  # starts as nothing
    head = model.base_model.model.lm_head.modules_to_save["default"].weight.detach().clone()
    base.load_mask(tmp_path / "two", "two")
    base.set_mask("two")
    with model.disable_adapter():
        assert_close(logits_of(model), expected["two"], rtol=1e-5, atol=1e-5)
    assert torch.equal(model.base_model.model.lm_head.modules_to_save["default"].weight, head)
    base.set_mask("default")
    with model.disable_adapter():
        assert_close(logits_of(model), expected["one"], rtol=1e-5, atol=1e-5)
    model.merge_adapter()
    with pytest.raises(SLTError, match="unmerge_adapter"):
        base.set_mask("two")
    model.unmerge_adapter()
    base.save_ticket(tmp_path / "again")  # the ticket below the adapter
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), expected["one"])


# The methods of PEFT's own tests of decoders, with the options that they need.
METHODS = {
    "AdaLora": {"total_step": 1},
    "BOFT": {},
    "C3A": {"block_size": 1},
    "CPT": {"cpt_token_ids": [0, 1, 2, 3], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 2, 3]},
    "FourierFT": {"n_frequency": 10},
    "HRA": {},
    "IA3": {},
    "LNTuning": {},
    "LoHa": {},
    "LoKr": {},
    "Lora": {"alora_invocation_tokens": [int(IDS[0, 3])]},  # activated by a token of the text
    "Miss": {"r": 2},
    "OFT": {},
    "OSF": {},
    "PrefixTuning": {"num_virtual_tokens": 4},
    "Road": {"variant": "road_1", "group_size": 2},
    "Shira": {"r": 1},
    "VBLoRA": {"vector_length": 1, "num_vectors": 2},
    "Vera": {"r": 8},
    "WaveFT": {"n_frequency": 8},
}
PROMPTS = ("CPT", "PrefixTuning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A ticket of a Llama, whose layers are such that every method takes them, and its folder."""
    folder = tmp_path_factory.mktemp("llama") / "ticket"
    architectures.make("llama").save_ticket(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_what_it_learns_on_stock(llama, method, tmp_path):
    """PEFT's default targets, training, saving and loading, generation, an adapter that is off or merged."""

    def adapted(model):
        torch.manual_seed(0)
        config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **METHODS[method])
        return trained(get_peft_model(copy.deepcopy(model).train(), config))

    stock = llama.merge_and_unload().requires_grad_(False)
    model, expected = adapted(llama), adapted(stock)
    found = logits_of(model)
    assert torch.equal(found, logits_of(expected))
    assert not torch.equal(found, logits_of(llama))
    text = model.generate(input_ids=IDS[:1], max_new_tokens=3, do_sample=False)
    assert torch.equal(text, expected.generate(input_ids=IDS[:1], max_new_tokens=3, do_sample=False))
    with model.disable_adapter():
        assert (
            torch.equal(logits_of(model), logits_of(llama)) or method == "OSF"
        )  # which has changed the weights
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama.name_or_path), tmp_path)
    assert_close(logits_of(again.eval()), found, rtol=1e-5, atol=1e-5)
    if method not in PROMPTS and "alora_invocation_tokens" not in METHODS[method]:
        merged = model.merge_and_unload()
        assert_close(logits_of(merged), logits_of(expected.merge_and_unload()), rtol=1e-5, atol=1e-5)
        with pytest.raises(SLTError, match="not those of its mask"):
            merged.save_ticket(tmp_path / "merged")


def test_layers_are_replicated_as_on_stock(llama):
    options = {"layer_replication": [[0, 2], [1, 2]], "target_modules": ["q_proj", "v_proj"]}
    stock = copy.deepcopy(llama).merge_and_unload().requires_grad_(False)
    model = with_lora(copy.deepcopy(llama), **options)
    assert len(model.base_model.model.model.layers) == 3
    assert_close(logits_of(model), logits_of(with_lora(stock, **options)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_a_table_that_scales_what_it_gives_is_adapted_as_on_stock(dora):
    """Gemma's: the adapter must be scaled too, whether it is merged or not."""
    ticket = architectures.make("gemma3").to_ticket()
    stock = ticket.merge_and_unload().requires_grad_(False)
    options = {"target_modules": ["embed_tokens"], "use_dora": dora}
    model, expected = with_lora(ticket, **options), with_lora(stock, **options)
    assert_close(logits_of(model), logits_of(expected), rtol=1e-5, atol=1e-5)
    for one in (model, expected):
        one.merge_adapter()  # which the tied head shares, on both sides
    assert_close(logits_of(model), logits_of(expected), rtol=1e-5, atol=1e-5)
