"""Every option is checked, and every frozen tensor gets the law and scale that the papers say."""

import copy
import json
import math

import pytest
from transformers import AutoConfig, GPT2Config

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel


def make(**options):
    return SupermaskGPT2Config(**{"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, r"density 0 is not in \(0, 1\]"),
        ({"density": 1.5}, "density 1.5"),
        ({"density": float("nan")}, "density nan"),
        ({"densty": 0.3}, "unknown option 'densty'.*did you mean 'density'"),
        ({"frobnicate": 1}, "unknown option 'frobnicate'"),
        ({"law": "cauchy"}, "law 'cauchy' is not one of 'normal'"),
        ({"embedding_law": "cauchy"}, "embedding_law 'cauchy'"),
        ({"rule": "magic"}, "rule 'magic'"),
        ({"qk_scale": "papers"}, "qk_scale 'papers' is neither 'paper' nor"),
        ({"qk_scale": -1.0}, "qk_scale -1.0 is neither .* nor a positive number"),
        ({"seed": -3}, "seed -3"),
        ({"n_head": 5}, "n_embd 32 is not a multiple of n_head 5.*n_qk and n_v"),
        ({"n_qk": 0}, "n_qk 0 is not positive"),
        ({"n_layer": 0}, "n_layer 0"),
        ({"add_cross_attention": True}, "add_cross_attention True is not"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True"),
        ({"embedding_rank": 4}, "embedding_rank 4: give embedding='trained'"),
        (
            {"embedding_rank": 4, "embedding": "trained", "tie_word_embeddings": False},
            "tie_word_embeddings=True",
        ),
        ({"embedding_rank": 0, "embedding": "trained"}, r"embedding_rank 0 is not in 1 \.\. n_embd 32"),
        ({"embedding_rank": 33, "embedding": "trained"}, "embedding_rank 33"),
        ({"weight_generator": "mt19937/1"}, "weight_generator 'mt19937/1'.*install the version"),
    ],
)
def test_wrong_options_are_named_with_their_cure(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("options", [{"embedding": "dense"}, {"density": "0.3"}, {"seed": 1.5}])
def test_wrong_types_are_refused(options):
    with pytest.raises(Exception, match=next(iter(options))):
        make(**options)


def test_free_head_widths_need_no_divisor():
    config = make(n_head=5, n_qk=3, n_v=7)
    assert (config.qk_width, config.v_width) == (3, 7)


def test_normal_law_is_gpt2s_and_the_papers():
    config = make(n_layer=8)
    assert config.law_of("h.0.attn.c_attn.value") == ("normal", 0.02)
    assert config.law_of("wte") == config.law_of("h.3.mlp.c_fc") == ("normal", 0.02)
    for name in ("h.0.attn.c_proj", "h.1.mlp.c_proj"):
        assert config.law_of(name) == ("normal", 0.02 / math.sqrt(2 * 8))
    for name in ("h.0.attn.c_attn.query", "h.7.attn.c_attn.key"):
        assert config.law_of(name)[1] == pytest.approx(0.02 * 8**0.25, rel=1e-15)


def test_uniform_law_is_the_theorys():
    config = make(law="uniform", n_qk=81, n_v=5)
    assert config.law_of("h.0.attn.c_attn.query") == ("uniform", 3.0)
    for name in ("h.0.attn.c_attn.value", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj"):
        assert config.law_of(name) == ("uniform", 1.0)


def test_qk_scale_by_number_touches_query_and_key_only():
    plain, scaled = make(qk_scale=1), make(qk_scale=3.5)
    for leaf in ("query", "key"):
        name = f"h.0.attn.c_attn.{leaf}"
        assert scaled.law_of(name)[1] == 3.5 * plain.law_of(name)[1]
    for name in ("wte", "h.0.attn.c_attn.value", "h.0.attn.c_proj", "h.0.mlp.c_fc"):
        assert scaled.law_of(name) == plain.law_of(name)


def test_scale_with_width_is_one_at_gpt2s_own_width():
    wide = make(n_embd=768, n_head=12)
    aware = make(n_embd=768, n_head=12, scale_with_width=True)
    narrow = make(n_embd=48, n_head=4, scale_with_width=True)
    for name in ("wte", "h.0.mlp.c_fc", "h.0.mlp.c_proj"):
        assert wide.law_of(name) == aware.law_of(name)
    assert narrow.law_of("h.0.mlp.c_fc")[1] == pytest.approx(0.02 * 4)  # sqrt(768 / 48)
    assert narrow.law_of("wpe")[1] == pytest.approx(0.02 * 16)  # 768 / 48


def test_embeddings_may_have_their_own_law_and_range():
    config = make(law="signed_constant", embedding_law="normal", embedding_range=0.5)
    assert config.law_of("wte") == config.law_of("lm_head") == ("normal", 0.5)
    assert config.law_of("h.0.mlp.c_fc") == ("signed_constant", 0.02)
    assert config.law_of("score")[0] == "signed_constant"


def test_a_basis_keeps_the_size_of_what_it_is_given():
    config = make(embedding="trained", embedding_rank=16, law="signed_constant", embedding_law="normal")
    assert config.law_of("wte.rows") == config.law_of("wpe") == ("normal", 0.02)
    assert config.law_of("wte.basis") == ("signed_constant", 0.25)  # 1 / sqrt(16)
    names = config.tensor_names()
    assert (config.shape_of("wte.rows"), config.shape_of("wte.basis")) == ((64, 16), (16, 32))
    assert "wte" not in names
    assert [config.kind_of(name) for name in ("wte.rows", "wte.basis", "wpe")] == [
        "trained",
        "masked",
        "trained",
    ]


def test_config_survives_disk_and_copy(tmp_path):
    config = make(
        seed=2**63, density=0.25, qk_scale=2.5, law="uniform", n_qk=3, layer_norm=False, hidden_size=16
    )
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is SupermaskGPT2Config
    assert again.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}
    written = json.loads((tmp_path / "config.json").read_text())["supermask"]
    assert written == {name: config.supermask[name] for name in written}
    assert again.supermask == config.supermask  # what is not written has its default
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    assert again.n_embd == 16


def test_a_dropout_given_as_an_integer_is_written_as_every_version_reads_it(tmp_path):
    dropouts = {"resid_pdrop": 0, "embd_pdrop": 1, "attn_pdrop": 0}
    make(**dropouts).save_pretrained(tmp_path / "config")
    SupermaskGPT2LMHeadModel(make(**dropouts)).save_ticket(tmp_path / "ticket")
    for folder in (tmp_path / "config", tmp_path / "ticket"):
        told = json.loads((folder / "config.json").read_text())
        assert [repr(told[name]) for name in dropouts] == ["0.0", "1.0", "0.0"]
    assert repr(SupermaskGPT2Config.from_dict({"embd_pdrop": 0}).embd_pdrop) == "0.0"  # of an older file
    assert {getattr(make(), name) for name in dropouts} == {getattr(GPT2Config(), name) for name in dropouts}


def test_an_unknown_key_in_a_file_is_kept_with_a_warning(tmp_path, caplog):
    config = make()
    config.colour = "blue"
    config.save_pretrained(tmp_path)
    assert not caplog.text
    assert AutoConfig.from_pretrained(tmp_path).colour == "blue"
    assert "the configuration holds 'colour', which is not an option" in caplog.text


def test_the_dictionary_of_a_configuration_makes_an_equal_one():
    config = SupermaskGPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, density=0.3, seed=7)
    changes = config.to_diff_dict()
    assert "hf_slt_version" in changes
    again = SupermaskGPT2Config(**changes)
    assert (again.density, again.seed) == (0.3, 7)
    assert again.to_diff_dict() == changes
