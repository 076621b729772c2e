"""Model cards: every number is one of the ticket's, the snippet runs, and what is unknown is left out."""

import ast
import math
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, make, tiny_config
from huggingface_hub import ModelCard

from hf_slt import SupermaskGPT2ForSequenceClassification, TicketError, verify_ticket
from hf_slt.about import install_command
from hf_slt.sharing.card import (
    EMBEDDED,
    describe_environment,
    describe_text,
    gap_closed,
    kind_of_ticket,
    link_page,
    measure_size,
    rename_card,
    resize_card,
    value_bytes,
    write_card,
)
from hf_slt.sharing.hub import REMOTE_FILE, _remove_foreign_code
from hf_slt.sharing.plots import plot_masks
from hf_slt.text.blocks import train_tokenizer
from hf_slt.tickets.writing import rewrite_ticket

pytest.importorskip("jinja2")
TEMPLATE = Path(__file__).parents[2] / "model_cards" / "template.md"
RECORDS = [
    {"kind": "evaluation", "step": 0, "loss": 7.0, "perplexity": math.exp(7.0), "bits_per_byte": 4.0},
    *({"kind": "train", "step": step, "loss": 5.0, "tokens_per_second": 1000.0 + step} for step in (1, 2, 3)),
    {"kind": "evaluation", "step": 3, "loss": 4.5, "perplexity": math.exp(4.5), "bits_per_byte": 2.25},
]
TRAINING = {
    "dataset": "Salesforce/wikitext",
    "dataset_config": "wikitext-103-raw-v1",
    "validation_split": "validation",
    "train_files": None,
    "tokenizer": "/home/somebody/tokenizer",
    "output_dir": "/home/somebody/runs",
    "cache_dir": "/scratch/somebody",
    "learning_rate": 0.01,
    "steps": 3,
}


def save_ticket(folder: Path, tokenizer: bool = False, **changes):
    model = make(**changes)
    model.save_ticket(folder)
    if tokenizer:
        train_tokenizer(["The mask of a seed. " * 9], 300, 64).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def ticket(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "ticket"
    save_ticket(folder, tokenizer=True, vocab_size=300)
    return folder


def table(card: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table whose heading begins so."""
    rows = card[card.index(f"| {heading}") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip(" `*") for cell in row.strip("|").split("|")] for row in rows]


def number(text: str) -> int:
    return int(text.replace(",", ""))


# ---------------------------------------------------------------------------- metadata


def test_metadata_parse_and_come_back(ticket):
    options = {"license": "apache-2.0", "language": "en", "text_sha256": "ab" * 32}
    path = write_card(ticket, TEMPLATE, name="me/tiny-ticket", records=RECORDS, training=TRAINING, **options)
    card = ModelCard.load(path)
    data = card.data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.license, data.language, data.model_name) == ("apache-2.0", "en", "tiny-ticket")
    assert data.datasets == "Salesforce/wikitext"
    assert "supermask" in data.tags
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == {"loss": 4.5, "perplexity": math.exp(4.5), "bits_per_byte": 2.25}
    for result in data.eval_results:
        assert (result.task_type, result.dataset_type) == ("text-generation", "Salesforce/wikitext")
        assert result.dataset_config == "wikitext-103-raw-v1"
        assert result.dataset_args == {"sha256": "ab" * 32}
    again = ModelCard(str(card))
    assert (again.data.to_dict(), again.text) == (data.to_dict(), card.text)


def test_what_is_unknown_is_left_out(ticket):
    path = write_card(ticket, TEMPLATE)
    card = ModelCard.load(path)
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    for word in ("## Results", "## Training", "None", "nan", "{{", "{%", "undefined", "\n\n\n"):
        assert word not in card.text, word
    assert "![" not in card.text


def test_a_measure_that_is_no_number_is_left_out(ticket):
    measures = {"loss": 800.0, "perplexity": math.inf, "bits_per_byte": math.nan}
    card = ModelCard.load(write_card(ticket, TEMPLATE, measures=measures, training={}))
    assert [result.metric_type for result in card.data.eval_results] == ["loss"]
    assert "800.0000" in card.text
    assert "inf |" not in card.text
    assert card.data.language == "en"  # with no text given, the embedded corpus


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, {"name": EMBEDDED}),
        ({"train_files": ["/home/me/a.txt", "b.txt"]}, {"name": "a.txt, b.txt"}),
        ({"train_files": ["a.txt"], "validation_files": ["/x/b.txt"]}, {"validation": "b.txt"}),
        ({"dataset": str(TEMPLATE.parent)}, {"name": "model_cards"}),
        (
            {"dataset": "a/b", "dataset_config": "c"},
            {"name": "a/b c", "dataset": "a/b", "config": "c", "validation": "validation text of a/b c"},
        ),
    ],
)
def test_text_is_named_without_folders(training, expected):
    found = describe_text(training)
    assert expected.items() <= found.items()
    assert ("dataset" in found) == ("dataset" in expected)
    assert "/home" not in str(found)


# ---------------------------------------------------------------------------- the snippet


def run_snippet(card: str, folder: Path, monkeypatch, capsys) -> str:
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(folder.parent)
    capsys.readouterr()
    exec(compile(snippet, "card", "exec"), {})
    return capsys.readouterr().out


def test_the_snippet_generates(ticket, tmp_path, monkeypatch, capsys):
    card = write_card(ticket, TEMPLATE).read_text()
    assert run_snippet(card, ticket, monkeypatch, capsys).startswith("The")
    # without a tokenizer
    save_ticket(tmp_path / "bare")
    card = write_card(tmp_path / "bare", TEMPLATE).read_text()
    ids = ast.literal_eval(run_snippet(card, tmp_path / "bare", monkeypatch, capsys))
    assert ids[0] == tiny_config().bos_token_id
    # of a classifier
    folder = tmp_path / "classifier"
    save_ticket(folder, True, model_class=SupermaskGPT2ForSequenceClassification, vocab_size=300)
    path = write_card(folder, TEMPLATE)
    assert ModelCard.load(path).data.pipeline_tag == "text-classification"
    assert "tensor([[" in run_snippet(path.read_text(), folder, monkeypatch, capsys)


# ---------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "case",
    ["normal", "normal-trained", "normal-low_rank", "constant-frozen-untied", "xavier-free_heads"],
    ids=str,
)
def test_numbers_are_those_of_the_ticket(case, tmp_path):
    folder = tmp_path / "ticket"
    model = save_ticket(folder, **CASES[case])
    card = write_card(folder, TEMPLATE).read_text()
    header = verify_ticket(folder)

    facts = {row[0]: row[1] for row in table(card, "|\n|---|---|\n| seed")}
    density = header.options["rule_options"]["density"]
    assert int(facts["seed"]) == header.options["seed"] == 7
    assert float(facts["density asked"]) == density == 0.5
    assert (facts["mask digest"], facts["ticket digest"]) == (header.mask_digest, header.digest)
    assert facts["weight generator"] == header.options["weight_generator"]
    assert facts["mask rule"] == "edge_popup"
    assert int(facts["width"]) == model.config.n_embd
    assert facts["embeddings"] == model.config.embedding
    assert facts["LayerNorm"] == str(model.config.layer_norm)
    assert facts.get("their rank") == (model.config.embedding_rank and str(model.config.embedding_rank))

    rows = {row[0]: row[1:] for row in table(card, "tensor | shape")}
    assert list(rows) == list(header.tensors)
    masks = model.mask_arrays()
    for name, (shape, law, scale, asked, kept, density) in rows.items():
        entry = header.tensors[name]
        assert tuple(map(int, shape.split(" x "))) == entry.shape
        assert law == (entry.law or "trained")
        if entry.law:
            assert float(scale) == pytest.approx(entry.scale, rel=1e-5)
        count, size = map(number, kept.split(" of "))
        assert size == entry.size
        assert count == (masks[name].sum() if name in masks else size)
        assert float(density) == pytest.approx(count / size, rel=1e-5)
        assert asked == (str(density) if name in masks else "")

    rows = table(card, "part | weights | bytes")
    weights_of = {row[0].split(" (")[0]: number(row[1].strip("*") or "0") for row in rows}
    parts = [number(row[2].strip("*")) for row in rows if not row[0].startswith("frozen")]
    for part, kind in {"masks": "masked", "trained values": "trained"}.items():
        assert weights_of[part] == sum(one.size for one in header.tensors.values() if one.kind == kind)
    assert parts[3] == sum(parts[:3]) == (folder / "mask.safetensors").stat().st_size
    assert parts[0] == sum(-(-mask.size // 8) for mask in masks.values())
    trained = [entry for entry in header.tensors.values() if entry.kind == "trained"]
    bits = header.options["embedding_bits"]  # and two bytes a row for its scale, if it has one
    by_hand = [entry.size * bits // 8 + (0 if bits == 32 else 2 * entry.shape[0]) for entry in trained]
    assert parts[1] == sum(by_hand) == sum(map(value_bytes, trained))
    weights = sum(entry.size for entry in header.tensors.values())
    assert f"{8 * parts[3] / weights:.3f} bits per weight" in card
    assert ("except" in card.split("##")[0]) == (CASES[case].get("embedding") == "trained")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "strict ticket (the mask keeps or drops drawn weights)"),
        ({"law": "signed_constant"}, "strict ticket (the mask keeps or drops drawn weights)"),
        (
            {"rule": "trellis", "density": None, "states": 64},
            "strict ticket (every weight is one of 64 drawn numbers)",
        ),
        ({"rule": "multicoat", "density": None}, "signs drawn (the mask multiplies drawn weights)"),
        ({"rule": "signed", "law": "signed_constant"}, "ternary (sign learned; the seed carries nothing)"),
        (
            {"rule": "sign", "law": "signed_constant", "density": None},
            "binary (sign learned; the seed carries nothing)",
        ),
        (
            {"rule": "multibit", "law": "signed_constant", "density": None},
            "4 levels (sign learned; the seed carries nothing)",
        ),
        ({"rule": "signed"}, "sign learned (magnitudes are drawn)"),
        ({"rule": "signed", "law": "signed_constant", "search": 0.5}, "sign learned (magnitudes are drawn)"),
    ],
    ids=str,
)
def test_a_card_says_whether_the_mask_chooses_or_sets_signs(changes, kind, tmp_path):
    save_ticket(tmp_path / "ticket", **changes)
    header = verify_ticket(tmp_path / "ticket")
    assert kind_of_ticket(header) == kind
    assert header.is_strict == kind.startswith("strict ticket")
    card = write_card(tmp_path / "ticket", TEMPLATE).read_text()
    assert f"| kind | {kind} |" in card
    assert ("strong-lottery-ticket" in ModelCard(card).data.tags) == kind.startswith("strict")
    keeps = kind == "strict ticket (the mask keeps or drops drawn weights)"
    assert ("whose weights were never trained" in card) == keeps
    assert ("None of these numbers was trained" in card) == (header.is_strict and not keeps)
    assert ("the seed carries nothing." in card.split("##")[0]) == ("nothing" in kind)


def test_a_card_says_how_tools_load_a_ticket_that_do_not_import_hf_slt(ticket):
    card = write_card(ticket, TEMPLATE).read_text()
    assert "trust_remote_code=True" in card
    assert f"The package hf_slt is needed: {install_command()}." in card


def test_sizes_of_a_ticket_under_the_usual_name(tmp_path):
    model = save_ticket(tmp_path / "a")
    model.to_ticket().save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").exists()
    one, other = (measure_size(tmp_path / name, verify_ticket(tmp_path / name)) for name in "ab")
    assert one["mask_bytes"] == other["mask_bytes"]
    assert other["file_name"] == "model.safetensors"
    assert "`model.safetensors` takes" in write_card(tmp_path / "b", TEMPLATE).read_text()


def test_results_and_controls_in_one_table(ticket):
    controls = {"random_mask": {"loss": 7.5}, "dense": {"loss": 3.5, "perplexity": 33.1154}}
    card = write_card(ticket, TEMPLATE, records=RECORDS, controls=controls, training=TRAINING).read_text()
    assert table(card, "| loss") == [
        ["ticket", "4.5000", f"{math.exp(4.5):.4f}", "2.2500"],
        ["random mask", "7.5000", "", ""],
        ["dense twin", "3.5000", "33.1154", ""],
    ]
    assert "closes **75.0 %**" in card
    assert "3 optimizer steps, 1,002 tokens per second" in card
    assert "validation text of Salesforce/wikitext wikitext-103-raw-v1" in card


def test_gap_closed_needs_all_three():
    assert gap_closed({"ticket": {"loss": 1.0}, "dense": {"loss": 0.5}}) is None
    assert gap_closed({label: {"loss": 1.0} for label in ("ticket", "dense", "random_mask")}) is None


# ---------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("build", ["", "+cu130"])
def test_arguments_command_and_environment_without_folders(ticket, tmp_path, monkeypatch, build):
    # A build for GPUs names CUDA in torch.__version__, but not in the version of the package.
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + build)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret" / "set").mkdir(parents=True)  # as a name on the Hub, but a folder
    words = "../secret/train.py --config secret/nano.yaml --output-dir=../secret/runs --cache_dir secret/c"
    words += " --train_files ../secret/x.txt ~/secret/y.txt --tokenizer /secret/tok/ --resume_from_checkpoint"
    words += " secret/step-1 --dataset secret/set --validation_files=C:\\\\secret\\\\z.txt"
    command = ["accelerate", "launch", *words.split(), "--tokenizer", "openai/gpt2", "--prompt", "a/b c"]
    paths = {"train_files": ["../secret/x.txt", "secret/y.txt"], "tokenizer": "secret/set", "prompt": "a/b"}
    paths |= {"output_dir": "secret/runs", "cache_dir": "secret", "resume_from_checkpoint": "secret/step-1"}
    for training in (TRAINING, {**TRAINING, "dataset": None, **paths}, {**TRAINING, "dataset": "secret/set"}):
        card = write_card(
            ticket, TEMPLATE, training=training, command=command, environment=describe_environment()
        ).read_text()
        assert "secret" not in card
        assert "somebody" not in card
        assert "accelerate launch train.py --config nano.yaml --output-dir=runs --cache_dir c" in card
        assert "--dataset set --validation_files=z.txt --tokenizer openai/gpt2 --prompt 'a/b c'" in card
        assert "learning_rate: 0.01" in card
        assert "output_dir: " not in card
        assert f"torch {version('torch')}" in card
        assert re.search(r"on \d+ (CPU cores|x )", card)
        if "prompt" in training:
            assert 'train_files: ["x.txt", "y.txt"]' in card
            assert 'prompt: "a/b"' in card


def test_a_renamed_card_is_the_authors_but_for_our_lines(ticket):
    ours = write_card(ticket, TEMPLATE, name="gpt2").read_text()
    renamed = write_card(ticket, TEMPLATE, name="me/ticket").read_text()
    assert rename_card(ours, "me/ticket") == renamed.replace("# ticket", "# gpt2")
    added = """
I compared it with `slt verify gpt2` and
base = AutoModelForCausalLM.from_pretrained("gpt2")
tokenizer = AutoTokenizer.from_pretrained("openai/gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2", dtype="auto")
"""
    assert rename_card(ours + added, "me/ticket") == rename_card(ours, "me/ticket") + added
    assert rename_card(added, "me/ticket") == added


@pytest.mark.parametrize("before", ["packed", "entropy", "model.safetensors"])
def test_a_resized_card_is_the_one_that_would_be_written_now(before, tmp_path):
    model = make().to_ticket()
    if before == "model.safetensors":
        model.save_pretrained(tmp_path / "ticket")
    else:
        model.save_ticket(tmp_path / "ticket", encoding=before)
    old = write_card(tmp_path / "ticket", TEMPLATE, records=RECORDS, training=TRAINING).read_text()
    after = "packed" if before == "entropy" else "entropy"
    header = rewrite_ticket(tmp_path / "ticket", tmp_path / "new" / "ticket", encoding=after)
    resize_card(tmp_path / "new" / "ticket", header)
    resized = (tmp_path / "new" / "ticket" / "README.md").read_text()
    assert resized != old
    assert (
        resized
        == write_card(tmp_path / "new" / "ticket", TEMPLATE, records=RECORDS, training=TRAINING).read_text()
    )


def test_a_card_links_the_page_once(ticket):
    ours = write_card(ticket, TEMPLATE, name="gpt2").read_text()
    linked = link_page(ours)
    (line,) = set(linked.splitlines()) - set(ours.splitlines())
    assert line.startswith("[index.html](index.html)")
    assert linked.index(line) < linked.index("## The ticket")
    assert link_page(linked) == linked
    assert linked.replace(f"\n\n{line}", "") == ours


def test_figures_are_shown_if_they_are_there(ticket, tmp_path):
    plot_masks({"wte": np.eye(16, dtype=bool)}, ticket / "masks.png")
    card = write_card(ticket, TEMPLATE).read_text()
    assert re.findall(r"!\[.*?\]\((.*?)\)", card) == ["masks.png"]
    (ticket / "masks.png").unlink()


def test_a_damaged_ticket_gets_no_card(tmp_path):
    folder = tmp_path / "ticket"
    save_ticket(folder)
    before = write_card(folder, TEMPLATE).read_text()
    path = folder / "mask.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TicketError, match="damaged"):
        write_card(folder, TEMPLATE, name="other")
    assert (folder / "README.md").read_text() == before


def test_a_card_does_not_disturb_the_ticket(ticket):
    write_card(ticket, TEMPLATE)
    files = {path.name for path in ticket.iterdir()}
    write_card(ticket, TEMPLATE)
    assert {path.name for path in ticket.iterdir()} == files
    verify_ticket(ticket)


def test_values_of_a_stranger_are_shown_without_markup(tmp_path):
    """config.json is not checked against a model here: only the files of the ticket are."""
    make("ticket").save_ticket(tmp_path / "ticket")
    header = verify_ticket(tmp_path / "ticket")
    path = tmp_path / "ticket" / "config.json"
    path.write_text(path.read_text().replace('"n_layer": 2', '"n_layer": "![x](http://x)<b>"'))
    text = write_card(tmp_path / "ticket", TEMPLATE, header=header).read_text()
    assert "--x--http---x--b-" in text
    assert not {"![x]", "<b>"} & {*re.findall(r"!\[x\]|<b>", text)}


def test_only_the_import_of_hf_slt_is_pushed(tmp_path):
    make("ticket").save_ticket(tmp_path)
    path = tmp_path / REMOTE_FILE
    _remove_foreign_code(path)
    assert path.exists()
    path.write_text(path.read_text() + "import os\n")
    _remove_foreign_code(path)
    assert not path.exists()
