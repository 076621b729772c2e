"""Supermask versions of any transformers model, each against its stock class."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from architectures import BATCHES, CASES, GROUPED, IDS, TEXT, every_architecture, logits_of, make
from cases import learned
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import hf_slt
from hf_slt.masks.modules import MaskedModule, masked_parameters
from hf_slt.models.loss import causal_lm_loss


@every_architecture
def test_masked_merged_and_loaded_it_is_the_stock_model(tmp_path, name):
    model = make(name, scale_with_width=True)
    expected = logits_of(model, name)
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    assert all(key.endswith("scores") for key in trained)
    assert not [key for key, one in trained.items() if one.grad is None or not one.grad.any()]
    stock = model.merge_and_unload()
    assert type(stock) is type(model).stock_class
    assert not [one for one in stock.modules() if isinstance(one, MaskedModule)]
    assert_close(logits_of(stock, name), expected, rtol=1e-5, atol=1e-5)
    for _, _, _, plan in masked_parameters(model):  # of every tensor just the density is kept
        for tensor in plan.tensors:
            kept = int(model.mask_arrays()[tensor.name].sum())
            assert kept == max(1, round(0.5 * tensor.size)), tensor.name
        break
    auto, headers = CASES[name][2], []
    for encoding in ("packed", "entropy"):
        headers.append(model.save_ticket(tmp_path / encoding, encoding=encoding))
        ticket = auto.from_pretrained(tmp_path / encoding)
        assert type(ticket) is type(model)
        assert type(ticket).__mro__[1:].count(type(stock)) == 1
        assert not [key for key, one in ticket.named_parameters() if one.requires_grad]
        assert torch.equal(logits_of(ticket, name), expected)
        assert hf_slt.verify_ticket(tmp_path / encoding).digest == headers[0].digest
    ticket.save_ticket(tmp_path / "again")
    again, first = ((tmp_path / folder / "mask.safetensors").read_bytes() for folder in ("again", "packed"))
    assert again == first


@every_architecture
def test_copies_casts_and_scores_on_disk(tmp_path, name):
    model = make(name)
    expected = logits_of(model, name)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(twin, name), expected)
    model.save_pretrained(tmp_path)
    again = CASES[name][2].from_pretrained(tmp_path)
    assert torch.equal(logits_of(again.eval(), name), expected)
    before = learned(model)
    weights = {path: module.weight for path, module in model.named_modules() if hasattr(module, "drawn")}
    model.to(torch.bfloat16)
    assert torch.isfinite(logits_of(model, name)).all()
    model.float()  # rotary frequencies are rounded then, as in the stock model; nothing of ours is
    scores = {key: one for key, one in learned(model).items() if key.endswith("scores")}
    assert all(torch.equal(one, before[key]) for key, one in scores.items())
    assert all(torch.equal(model.get_submodule(path).weight, one) for path, one in weights.items())


def learned_gradients(model):
    return {key: one.grad.clone() for key, one in model.named_parameters() if one.requires_grad}


def loss_and_gradients(model, name: str):
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    loss = model(**BATCHES[CASES[name][3]]).loss
    loss.backward()
    return {"loss": loss.detach(), **learned_gradients(model)}


@every_architecture
def test_gradient_checkpointing(name):
    model = make(name)
    expected = loss_and_gradients(model.train(), name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(loss_and_gradients(model, name), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [one if one in ("llama", "vit") else pytest.param(one, marks=pytest.mark.exhaustive) for one in CASES],
)
def test_compiled_it_is_the_same(name):
    """By the tracer that every backend has. GPT-2 has more in test_compile.py; `make test-all` compiles all."""
    torch.compiler.reset()
    model = make(name, search=0.5) if name == "llama" else make(name)
    expected = loss_and_gradients(model, name)
    step = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    loss = step(**BATCHES[CASES[name][3]]).loss
    loss.backward()
    found = {"loss": loss.detach(), **learned_gradients(model)}
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "bert", "vit", "t5"])
@pytest.mark.parametrize(
    "options",
    [
        {"scales": "row", "layer_norm": "trained", "law": "signed_constant"},
        {"rule": "signed", "density": 0.7, "search": 0.5, "scales": "tensor"},
        {"embedding": "trained", "embedding_bits": 8, "biases": "trained"},
        {"embedding": "frozen", "qk_scale": 2, "law": "uniform", "embedding_law": "normal"},
    ],
    ids=["scales", "signed", "trained", "frozen"],
)
def test_options_hold_for_every_architecture(tmp_path, name, options):
    model = make(name, **options)
    expected = logits_of(model, name)
    model.save_ticket(tmp_path, encoding="entropy")
    ticket = CASES[name][2].from_pretrained(tmp_path)
    assert torch.equal(logits_of(ticket, name), expected)
    assert_close(logits_of(ticket.merge_and_unload(), name), expected, rtol=1e-5, atol=1e-5)
    assert not [key for key, one in model.named_parameters() if one.requires_grad and one.grad is None]


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
def test_without_norms(tmp_path, name):
    model = make(name, layer_norm=False)
    assert not [one for one in model.modules() if type(one).__name__.endswith(("LayerNorm", "RMSNorm"))]
    model.save_ticket(tmp_path)
    again = CASES[name][2].from_pretrained(tmp_path)
    assert torch.equal(logits_of(again, name), logits_of(model, name))
    with pytest.raises(ValueError, match="cannot be merged"):
        model.merge_and_unload()


def test_qk_scale_is_on_queries_and_keys_only():
    plain, scaled = (make("llama", qk_scale=factor) for factor in (1, 3))
    for path in ("q_proj", "k_proj", "v_proj", "o_proj"):
        one, other = (model.model.layers[0].self_attn.get_submodule(path).drawn for model in (plain, scaled))
        assert_close(other, one * 3 if path in ("q_proj", "k_proj") else one)


@pytest.mark.parametrize(
    ("name", "path", "rows"),
    [
        # Query, key and value lie one after the other, 32, 16 and 16 rows; or 8 of each for every head.
        ("phi3", "model.layers.0.self_attn.qkv_proj", [*range(48)]),
        (
            "gpt_neox",
            "gpt_neox.layers.0.attention.query_key_value",
            [row for row in range(96) if row % 24 < 16],
        ),
    ],
)
def test_qk_scale_is_on_queries_and_keys_of_a_fused_matrix(name, path, rows):
    plain, scaled = (make(name, qk_scale=factor, density=1.0).get_submodule(path) for factor in (1, 3))
    factors = torch.ones(len(plain.weight), 1)
    factors[rows] = 3
    assert_close(scaled.weight, plain.weight * factors)
    assert [tensor.name.rsplit(".")[-1] for tensor in plain.parameter_plans["weight"].tensors] == [
        "query",
        "key",
        "value",
    ]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_loss_in_pieces_is_that_of_stock(name, monkeypatch):
    monkeypatch.setattr("hf_slt.models.loss._FEW", 0)
    model = make(name)
    assert model.loss_function is causal_lm_loss
    stock = model.merge_and_unload()
    assert_close(model(IDS, labels=IDS).loss, stock(IDS, labels=IDS).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "t5"])
def test_generation_is_that_of_stock(name):
    model = make(name)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), model.merge_and_unload().generate(IDS, **options))


@pytest.mark.parametrize(
    "auto",
    [
        AutoModel,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoModelForQuestionAnswering,
        AutoModelForMaskedLM,
    ],
)
def test_every_head_of_an_architecture_has_its_auto_class(tmp_path, auto):
    config = hf_slt.supermask_config(transformers.BertConfig(**TEXT), density=0.5)
    model = auto.from_config(config).eval()
    assert (
        type(model).__name__ == f"Supermask{type(auto.from_config(transformers.BertConfig(**TEXT))).__name__}"
    )
    model.save_ticket(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert torch.equal(again(IDS)[0], model(IDS)[0])
    bare = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(bare(IDS)[0], model.base_model(IDS)[0])


def test_classes_have_ordinary_names_and_can_be_imported():
    from hf_slt import SupermaskLlamaConfig, SupermaskLlamaForCausalLM

    model = make("llama")
    assert type(model) is SupermaskLlamaForCausalLM
    assert type(model.config) is SupermaskLlamaConfig
    assert model.config.model_type == "supermask_llama"
    assert SupermaskLlamaForCausalLM.__doc__
    assert not hasattr(hf_slt.SupermaskBertModel, "generate")  # as the stock class
    with pytest.raises(AttributeError, match="SupermaskNothing"):
        hf_slt.SupermaskNothing  # noqa: B018


def with_vocabulary(name: str, rows: int, **options):
    """A fresh model of an architecture with so many tokens."""
    stock, sizes, auto, _ = CASES[name]
    config = getattr(transformers, f"{stock}Config")(**{**sizes, "vocab_size": rows})
    return auto.from_config(hf_slt.supermask_config(config, **{"density": 0.5, "seed": 7, **options}))


RESIZED = {
    **{name: {} for name in CASES if name not in ("gpt2", "vit", "mistral", "qwen3", "mixtral")},
    "llama": {"scales": "row"},
    "mistral": {"embedding": "frozen"},
    "qwen3": {"embedding": "trained", "embedding_bits": 8},
    "bert": {"biases": "trained", "scales": "row"},
    "t5": {"embedding": "trained"},
}


@pytest.mark.parametrize(("name", "rows"), [*((name, 80) for name in RESIZED), ("llama", 50), ("bert", 50)])
def test_the_vocabulary_is_resized(tmp_path, name, rows):
    """The oracle is a fresh model of that vocabulary that is given what was learned of the rows in both."""
    options = RESIZED[name]
    model, expected = make(name, **options), with_vocabulary(name, rows, **options).eval()
    ticket, both = model.to_ticket(), min(64, rows)
    batch = {
        key: one % 50 if one.dtype == torch.int64 else one for key, one in BATCHES[CASES[name][3]].items()
    }
    with torch.no_grad():
        fixed = ticket(**batch).logits
    before, wanted = dict(model.named_parameters()), dict(expected.named_parameters())
    with torch.no_grad():
        for path, values in wanted.items():
            axis = next((at for at, size in enumerate(values.shape) if size != before[path].shape[at]), None)
            if axis is None:
                values.copy_(before[path])
                continue
            if path.endswith(".values"):  # a trained table: the mean of the others
                values.copy_(before[path].mean(0).expand_as(values))
            values.narrow(axis, 0, both).copy_(before[path].narrow(axis, 0, both))
    for one in (model, ticket):
        assert one.resize_token_embeddings(rows) is one.get_input_embeddings()
        assert one.config.vocab_size == one.vocab_size == one.get_input_embeddings().num_embeddings == rows
        known = [module.vocab_size for module in one.modules() if hasattr(module, "vocab_size")]
        assert {*known} == {rows}, "the models within know it too"
        head = one.get_output_embeddings()
        assert head is None or head.weight.shape[0] == head.out_features == rows
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[path], values) for path, values in wanted.items())
    assert all(torch.equal(one, dict(expected.named_buffers())[path]) for path, one in model.named_buffers())
    with torch.no_grad():
        logits = expected(**batch).logits
        assert torch.equal(model(**batch).logits, logits)
        assert logits.shape[-1] == rows
        # What a ticket says of the old tokens stays. (Scores are ranked anew, over all rows.)
        assert_close(ticket(**batch).logits[..., :both], fixed[..., :both], rtol=1e-5, atol=1e-5)
        stock = ticket.merge_and_unload()
        assert_close(stock(**batch).logits, ticket(**batch).logits, rtol=1e-5, atol=1e-5)
        for one, folder in ((model, tmp_path / "scores"), (ticket, tmp_path / "ticket")):
            one.save_pretrained(folder)
            again = type(one).from_pretrained(folder)
            assert torch.equal(again(**batch).logits, one(**batch).logits)
    model.train()(**batch).loss.backward()
    assert not [path for path, one in model.named_parameters() if one.requires_grad and one.grad is None]


def test_a_vocabulary_that_cannot_be_resized_is_refused(tmp_path):
    before = logits_of(searched := make("llama", search=0.5), "llama")
    for one in (searched, searched.to_ticket()):
        with pytest.raises(hf_slt.SLTError, match="which weights are searched depends on its rows"):
            one.resize_token_embeddings(80)
        assert torch.equal(logits_of(one, "llama"), before)
        assert one.config.vocab_size == 64
    with pytest.raises(hf_slt.SLTError, match="SupermaskViTForImageClassification has no vocabulary"):
        make("vit").resize_token_embeddings(80)


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match=r"unknown option 'densty'; did you mean 'density'\?"):
        hf_slt.supermask_config(transformers.LlamaConfig(**GROUPED), densty=0.3)
    with pytest.raises(ValueError, match="head_bias is an option of SupermaskGPT2Config only"):
        hf_slt.supermask_config(transformers.LlamaConfig(**GROUPED), head_bias=True)


def test_a_ticket_loads_in_a_process_that_imports_hf_slt_and_nowhere_else(tmp_path):
    make("llama").save_ticket(tmp_path)
    load = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", f"import hf_slt; {load}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)
    assert done.returncode != 0  # a custom model type is never a stock model with random weights
    assert AutoConfig.from_pretrained(tmp_path).model_type == "supermask_llama"
