"""Tests of the slt command: every command once as the installed script, everything else in this process."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attack
import numpy as np
import pytest
import torch
from cases import logits_of, tiny_config, train_a_little
from plain_install import project
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedTokenizerFast

import hf_slt
from hf_slt import SupermaskGPT2LMHeadModel, verify_ticket
from hf_slt.cli import main
from hf_slt.papers.curvature import BLOCKS, block_curvature
from hf_slt.sharing.card import kept_of
from hf_slt.text.evaluation import evaluate_text

SLT = shutil.which("slt", path=Path(sys.executable).parent)


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<end>", *(f"w{index}" for index in range(63))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    model = SupermaskGPT2LMHeadModel(tiny_config(density=0.3))
    for name in ("one", "two"):
        train_a_little(model).save_ticket(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def dense(shelf):
    AutoModelForCausalLM.from_pretrained(shelf / "one").merge_and_unload().save_pretrained(shelf / "dense")
    make_tokenizer().save_pretrained(shelf / "dense")
    return shelf / "dense"


@pytest.fixture
def folder(shelf, tmp_path):
    return Path(shutil.copytree(shelf / "one", tmp_path / "ticket"))


def run(capsys, *words) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def script(*words) -> tuple[int, str, str]:
    """Run the same with the installed command."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([SLT, *map(str, words)], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_inspect_shows_what_the_file_holds(shelf, tmp_path):
    code, out, _ = script("inspect", shelf / "one", "--figure", tmp_path / "masks.png")
    header = hf_slt.verify_ticket(shelf / "one")
    assert code == 0
    assert (tmp_path / "masks.png").read_bytes()[1:4] == b"PNG"
    assert header.mask_digest in out
    assert "strict ticket (the mask keeps or drops drawn weights)" in out
    for name, entry in header.tensors.items():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert f" {kept_of(header, entry) / entry.size:.4f} " in line
        assert f" {' x '.join(map(str, entry.shape))} " in line
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert f"{(shelf / 'one' / 'mask.safetensors').stat().st_size:,}" in out


def test_inspect_as_json_adds_up(capsys, shelf):
    for source in (shelf / "one", shelf / "one" / "mask.safetensors"):
        _, out, _ = run(capsys, "inspect", source, "--json")
        facts = json.loads(out)
        assert facts["config"]["supermask"]["seed"] == 7
        assert facts["kind"].startswith("strict")
        size = facts["bytes"]
        assert size["file"] == size["mask_bytes"] + size["trained_bytes"] + size["description_bytes"]
        assert size["weights"] == sum(tensor["size"] for tensor in facts["tensors"].values())


def test_verify(capsys, folder):
    code, out, _ = script("verify", folder)
    assert (code, out.count("\n")) == (0, 1)
    assert "weights" not in run(capsys, "verify", folder, "--no-weights")[1]
    data = bytearray((folder / "mask.safetensors").read_bytes())
    data[-3] ^= 1
    data[-3000] ^= 1
    (folder / "mask.safetensors").write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    config["supermask"]["seed"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = run(capsys, "verify", folder)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert all(line.startswith("slt: ") for line in lines)
    assert sum("in its metadata: damaged" in line for line in lines) == 2  # one for each tensor
    assert sum("seed=7, but config.json says 8" in line for line in lines) == 1
    assert len(lines) == 3


def test_diff(capsys, shelf):
    _, out, _ = script("diff", shelf / "one", shelf / "two", "--json")
    found = json.loads(out)
    one, two = (
        SupermaskGPT2LMHeadModel.from_pretrained(shelf / name).mask_arrays() for name in ("one", "two")
    )
    assert found["wte"]["hamming"] == (one["wte"] != two["wte"]).sum() > 0
    _, out, _ = run(capsys, "diff", shelf / "one", shelf / "two")
    assert f"{found['all']['hamming']:,}" in out.splitlines()[-3]


def test_combine_and_pack(capsys, shelf, tmp_path):
    new = tmp_path / "new"
    assert script("combine", "union", shelf / "one", shelf / "two", "--output", new)[0] == 0
    one, two = (
        SupermaskGPT2LMHeadModel.from_pretrained(shelf / name).mask_arrays() for name in ("one", "two")
    )
    masks = SupermaskGPT2LMHeadModel.from_pretrained(new).mask_arrays()
    assert all(np.array_equal(masks[name], one[name] | two[name]) for name in one)
    before = (new / "mask.safetensors").read_bytes()
    code, out, _ = script("pack", new, "--encoding", "entropy")
    assert code == 0
    assert f"{len(before):,}" in out
    assert (new / "mask.safetensors").stat().st_size < len(before)
    assert run(capsys, "pack", new, "--encoding", "packed", "--output", tmp_path / "back")[0] == 0
    assert (tmp_path / "back" / "mask.safetensors").read_bytes() == before
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_merge_writes_stock_gpt2(capsys, shelf, tmp_path):
    assert script("merge", shelf / "one", tmp_path / "stock")[0] == 0
    stock = GPT2LMHeadModel.from_pretrained(tmp_path / "stock")
    ticket = AutoModelForCausalLM.from_pretrained(shelf / "one")
    torch.testing.assert_close(logits_of(stock), logits_of(ticket))
    assert (tmp_path / "stock" / "tokenizer.json").exists()
    (tmp_path / "stock" / "mine.txt").write_text("mine")
    assert (
        run(capsys, "merge", shelf / "one", tmp_path / "stock")[0] == 1
    )  # it stays, unless that is asked for
    assert run(capsys, "merge", shelf / "two", tmp_path / "stock", "--overwrite")[0] == 0
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "stock")
    assert not torch.equal(logits_of(again), logits_of(stock))
    assert (tmp_path / "stock" / "mine.txt").read_text() == "mine"


def test_generate(capsys, shelf):
    words = ("generate", shelf / "one", "--prompt", "w1 w2", "--max_new_tokens", "5")
    code, out, _ = script(*words, "--greedy")
    model = AutoModelForCausalLM.from_pretrained(shelf / "one")
    ids = model.generate(torch.tensor([[2, 3]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert code == 0
    assert out.split() == make_tokenizer().decode(ids[0], skip_special_tokens=True).split()
    drawn = run(capsys, *words, "--seed", "1")[1]
    assert drawn == run(capsys, *words, "--seed", "1")[1]
    other = run(capsys, *words, "--greedy", "--mask", shelf / "two")[1]
    assert other == run(capsys, "generate", shelf / "two", *words[2:], "--greedy")[1] != out
    code, _, err = run(capsys, "generate", shelf / "one", "--prompt", "w1 " * 64)
    assert (code, err.count("\n")) == (1, 1)
    assert "64 tokens" in err


ESCAPE = chr(27)


def test_nothing_of_a_stranger_moves_the_terminal_or_runs(capsys, folder, monkeypatch):
    """Try names and tokens with escape characters, code in the ticket's folder, and keys of the wrong type."""
    data = (folder / "mask.safetensors").read_bytes()
    for change in ("tensor", "rule"):
        table, facts, tensors = attack.take_apart(data)
        if change == "tensor":
            facts["tensors"][f"{ESCAPE}[2J"] = facts["tensors"].pop("wpe")
        else:
            facts["config"]["supermask"]["rule"] = f"![x](http://x) {ESCAPE}"
        (folder / "mask.safetensors").write_bytes(attack.put_together(table, facts, tensors))
        for command in ("inspect", "verify"):
            code, out, err = run(capsys, command, folder)
            assert code == 1
            assert "is not a name" in err
            assert ESCAPE not in out + err
    (folder / "mask.safetensors").write_bytes(data)
    words = ("generate", folder, "--prompt", "w1 w2", "--max_new_tokens", "5", "--greedy")
    before = run(capsys, *words)[1]
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(re.sub(r'"w(\d+)"', r'"w\1\\u001b"', text))
    escaped = run(capsys, *words[:2], "--prompt", f"w1{ESCAPE} w2{ESCAPE}", *words[4:])[1]
    assert escaped == before.replace(" ", "\\x1b ").replace("\n", "\\x1b\n")
    (folder / "tokenizer.json").write_text(text)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["code.Words", None]}, "tokenizer_class": "Words"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text("raise SystemExit('was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked to run code"))
    for command in (words, ("page", folder, folder / "page.html")):
        assert run(capsys, *command)[0] in (0, 1)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"architectures": -1}, {"auto_map": 5}):
        (folder / "config.json").write_text(json.dumps(config | change))
        for command in (words, ("verify", folder)):
            code, _, err = run(capsys, *command)
            assert code == 1
            assert f"{next(iter(change))} {next(iter(change.values()))} is not" in err


def test_generate_stops_at_the_last_position_and_says_so(capsys, shelf):
    words = ("generate", shelf / "one", "--prompt", "w1 " * 60, "--greedy")
    code, out, err = run(capsys, *words, "--max_new_tokens", "3")
    assert (code, len(out.split()), err) == (0, 63, "")
    code, out, err = run(capsys, *words, "--max_new_tokens", "9")
    assert (code, len(out.split()), err.count("\n")) == (0, 64, 1)
    assert "at most 4 new tokens: the model has 64 positions" in err


def test_generate_without_a_start_token(capsys, folder):
    """Text begins with end-of-text, as in training. Without such a token, the command asks for a prompt."""
    words = ("generate", folder, "--greedy", "--max_new_tokens", "5")
    whole = run(capsys, *words)
    assert whole[0] == 0
    path = folder / "tokenizer_config.json"
    for name in ("bos_token", "eos_token"):
        settings = json.loads(path.read_text())
        del settings[name]
        path.write_text(json.dumps(settings))
        if name == "bos_token":
            assert run(capsys, *words) == whole
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "its tokenizer has no start token to begin with; give --prompt" in err
    assert run(capsys, *words, "--prompt", "w1")[0] == 0


def test_a_prompt_longer_than_the_model_is_one_line(capfd, folder):
    """This holds also if the tokenizer has its own limit, as tokenizers of a run have."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 64}))
    code, out, err = run(capfd, "generate", folder, "--prompt", "w1 " * 80)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "the prompt has 80 tokens, the model takes 63 at most; shorten it" in err


def test_generate_with_a_tokenizer_from_elsewhere(capsys, folder, shelf):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    words = ("generate", folder, "--prompt", "w1 w2", "--greedy", "--max_new_tokens", "5")
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "there is no tokenizer in the model's folder" in err
    whole = run(capsys, "generate", shelf / "one", *words[2:])
    assert run(capsys, *words, "--tokenizer", shelf / "two") == whole


@pytest.mark.parametrize("kind", ["ticket", "another ticket", "scores"])
def test_merge_does_not_overwrite_what_it_could_merge(capsys, shelf, folder, tmp_path, kind):
    SupermaskGPT2LMHeadModel(tiny_config()).save_pretrained(tmp_path / "scores")
    source, target = {
        "ticket": (folder, f"{folder}/../{folder.name}"),
        "another ticket": (shelf / "one", folder),
        "scores": (tmp_path / "scores", tmp_path / "scores"),
    }[kind]
    before = {path: path.read_bytes() for path in Path(target).iterdir()}
    code, _, err = run(capsys, "merge", source, target)
    assert (code, err.count("\n")) == (1, 1)
    assert "give another folder" in err
    assert {path: path.read_bytes() for path in Path(target).iterdir()} == before


def test_evaluate(capsys, shelf, tmp_path):
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 " * 20)
    words = ["evaluate", shelf / "one", "--files", tmp_path / "text.txt", "--stride", 4, "--block-size=8"]
    code, out, err = script(*words, "--json")
    assert (code, err) == (0, "")
    model = AutoModelForCausalLM.from_pretrained(shelf / "one")
    found = evaluate_text(model, make_tokenizer(), [(tmp_path / "text.txt").read_text()], 8, 4)
    assert json.loads(out) == pytest.approx(found, rel=1e-6)
    code, out, _ = run(capsys, *words)
    assert out.startswith(f"loss {found['loss']:.6g}  perplexity ")


@pytest.mark.parametrize("kind", ["ticket", "scores", pytest.param("stock", marks=pytest.mark.exhaustive)])
def test_curvature_of_whatever_is_saved(capsys, shelf, tmp_path, kind):
    model = {
        "ticket": lambda: AutoModelForCausalLM.from_pretrained(shelf / "one"),
        "scores": lambda: train_a_little(SupermaskGPT2LMHeadModel(tiny_config(density=0.3))),
        "stock": lambda: AutoModelForCausalLM.from_pretrained(shelf / "one").merge_and_unload(),
    }[kind]()
    saved, text, space = tmp_path / "model", tmp_path / "text.txt", "weight" if kind == "stock" else "score"
    if kind == "ticket":
        saved = shelf / "one"
    else:
        model.save_pretrained(saved)
        make_tokenizer().save_pretrained(saved)
    text.write_text(" ".join(f"w{index % 60}" for index in range(200)))
    words = ["curvature", saved, "--space", space, "--files", text, "--sequences", 2, "--block_size", 8]
    words += ["--probes", 3]
    code, out, err = run(capsys, *words, "--figure", tmp_path / "figure.png")
    assert code == 0
    assert re.search(r"^curvature: (\d+) of \1 blocks, ", err, re.M)  # no terminal: lines, and no bar
    assert "\r" not in err
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    code, printed, err = run(capsys, *words, "--json", "--eigenvalues")
    assert (code, err) == (0, "")
    facts = json.loads(printed)

    ids = torch.tensor([[1 + index % 60 for index in range(start, start + 8)] for start in (0, 8)])
    blocks = facts["blocks"]
    for label, ways in (("LayerNorm", "keep"), ("no LayerNorm", "remove")):
        rows = block_curvature(model, ids, BLOCKS, space, 3, layer_norm=ways)
        mine = [record for record in blocks if record["setting"] == label]
        assert [(one["layer"], one["block"]) for one in mine] == [(row.layer, row.block) for row in rows]
        for one, row in zip(mine, rows, strict=True):
            assert one["norm"] == pytest.approx(row.norm, rel=1e-4)
            assert one["norm_outer"] == pytest.approx(row.norm_outer, rel=1e-4)
            assert one["largest"] == pytest.approx(row.largest, rel=1e-2)
        norms = {(row.layer, row.block): row.norm for row in rows}
        assert facts["value_to_query"][label]["0"] == pytest.approx(norms[0, "v"] / norms[0, "q"], rel=1e-4)
    assert out.startswith(f"LayerNorm, norms of H over {space}s")
    assert "\nno LayerNorm, norms" in out
    assert out.count("v/q") == 2


def test_curvature_of_the_embedded_corpus_one_way(shelf):
    words = ["curvature", shelf / "one", "--layer_norm", "remove", "--probes", 1, "--block_size", 4]
    code, out, _ = script(*words, "--sequences", 1, "--json")
    assert code == 0
    assert {one["setting"] for one in json.loads(out)["blocks"]} == {"no LayerNorm"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "{tmp}/nothing"], "no such folder"),
        (["inspect", "{tmp}"], "no such file"),
        (["verify", "{tmp}/nothing"], "no such folder"),
        (["diff", "{shelf}/one", "{tmp}"], "no such file"),
        (["combine", "union", "{shelf}/one", "--output", "{tmp}/new"], "at least two"),
        (["pack", "{tmp}/nothing", "--encoding", "entropy"], "no such folder"),
        (["merge", "{tmp}/nothing", "{tmp}/out"], "no such folder"),
        (["generate", "{tmp}", "--prompt", "x"], "config.json"),
        (["push", "{tmp}/nothing", "me/ticket"], "no such folder"),
        (["evaluate", "{tmp}/nothing"], "no such folder"),
        (["curvature", "{tmp}/nothing"], "no such folder"),
        (["evaluate", "{shelf}"], "cannot load"),
        (["merge", "{shelf}/dense", "{tmp}/new"], "dense: not a supermask model"),
        (["generate", "{shelf}/dense", "--mask", "{shelf}/one"], "--mask works only with one"),
        (["combine", "union", "{shelf}/one", "{shelf}/two", "--output", "{shelf}/one"], "another folder"),
        (["evaluate", "{shelf}/one", "--files", "{tmp}/none.txt"], "there is no file"),
        (["evaluate", "{shelf}/one", "--block_size", "99"], "block_size 99 is not in 1..64"),
        (["evaluate", "{shelf}/one", "--device", "abacus"], "--device abacus cannot be used here"),
        (["generate", "{shelf}/one", "--device", "xpu"], "--device xpu cannot be used here"),
        (["curvature", "{shelf}/one", "--device", "xpu"], "--device xpu cannot be used here"),
        (["curvature", "{shelf}/one", "--files", "{tmp}/none.txt"], "there is no file"),
        (["curvature", "{shelf}/one", "--block_size", "1000"], "the positions of the model"),
        (
            ["generate", "{shelf}/one", "--temperature", "0"],
            "--temperature 0 is not positive; --greedy always",
        ),
        (["generate", "{shelf}/one", "--temperature", "nan"], "--temperature nan is not positive; --greedy"),
        (["generate", "Hello"], "Hello: no such folder, and not a name on the Hub (such as me/ticket); to"),
        (["generate", "Hello world?"], "to continue a text, give it as --prompt 'Hello world?'"),
        (["generate", "{shelf}/one", "--prompt", " "], "the prompt ' ' has no tokens"),
        (
            ["merge", "{shelf}/one", "{shelf}/dense"],
            "dense: the folder exists and is not empty; give another",
        ),
        (["merge", "{shelf}/one", "{shelf}/dense/config.json"], "config.json is a file, not a folder"),
        (["merge", "{shelf}/one", "{shelf}/dense/config.json/new"], "config.json is a file, not a folder"),
        (["pack", "{shelf}/one", "--output", "{shelf}/dense/config.json"], "is a file, not a folder; give"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("dense")
def test_what_goes_wrong_is_one_line(capsys, shelf, tmp_path, words, message):
    code, out, err = run(capsys, *(word.format(tmp=tmp_path, shelf=shelf) for word in words))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["inspect", "generate", "evaluate"])
def test_a_missing_folder_is_not_sought_on_the_hub(capsys, shelf, monkeypatch, command):
    def asked(*args, **options):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("hf_slt.sharing.hub.snapshot_download", asked)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", asked)
    monkeypatch.chdir(shelf.parent)
    for name in (f"{shelf.name}/missing", "./missing", f"{shelf.name}/one/missing"):
        code, out, err = run(capsys, command, name)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"{name}: no such folder" in err


def test_push_as_a_script_fails_in_one_line(tmp_path):
    """The upload itself is tested in sharing/test_hub.py."""
    code, out, err = script("push", tmp_path / "nothing", "me/ticket")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no such folder" in err


def test_debug_shows_where_it_went_wrong(tmp_path):
    with pytest.raises(hf_slt.TicketError, match="no such folder"):
        main(["--debug", "inspect", str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dance"], "slt: argument COMMAND: invalid choice: 'dance'"),
        (["inspect"], "slt inspect: the following arguments are required: TICKET"),
        (["generate", "x", "--dtype", "foo"], "slt generate: argument --dtype: invalid choice: 'foo'"),
        (["evaluate", "x", "--dtype", "foo"], "slt evaluate: argument --dtype: invalid choice: 'foo'"),
        (["pack", "x", "--encoding", "zip"], "slt pack: argument --encoding: invalid choice: 'zip'"),
        (["inspect", "x", "--jsn"], "slt inspect: unknown option --jsn; did you mean --json?"),
        (["generate", "x", "--tokens", "3"], "unknown option --tokens; did you mean --max_new_tokens?"),
        (["generate", "x", "--max-new-tokens", "many"], "--max_new_tokens: invalid int value: 'many'"),
        (["generate", "x", "--max-new-tokens", "-3"], "--max_new_tokens: -3 is not positive; give 1 or more"),
        (["generate", "x", "--top_k", "0"], "--top_k: 0 is not positive; give 1 or more"),
        (
            ["generate", "x", "Hello"],
            "'Hello' is one word too many; to continue a text, give it as --prompt 'Hello'",
        ),
        (["verify", "x", "Hello"], "slt verify: 'Hello' is one word too many (see"),
        (["curvature", "x", "--probes", "0"], "--probes: 0 is not positive; give 1 or more"),
        (["curvature", "x", "--sequences", "0"], "--sequences: 0 is not positive; give 1 or more"),
        (["evaluate", "x", "--batch_size", "0"], "--batch_size: 0 is not positive; give 1 or more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_words_are_named_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr().err
    assert (ended.value.code, shown.count("\n")) == (2, 1)
    assert message in shown


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["merge", "--help"], 0), (["dance"], 2), ([], 0)], ids=str
)
def test_help_and_wrong_words_do_not_wait_for_torch(words, code):
    """Start as the installed script does, and check what has been imported by then."""
    done, imported = run_and_see_imports(words)
    assert done.returncode == code
    assert "slt" in (done.stderr if code else done.stdout)
    assert not {"torch", "transformers", "numpy"} & imported


def run_and_see_imports(words) -> tuple[subprocess.CompletedProcess, set[str]]:
    """Run the installed script in a new process and return the modules that it has imported."""
    (module, function) = project()["scripts"]["slt"].split(":")
    program = f"import sys\ntry:\n    from {module} import {function}\n    code = {function}()\n"
    program += "finally:\n    print(*sys.modules)\nsys.exit(code)"
    command = [sys.executable, "-c", program, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_slt.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done, set(done.stdout.splitlines()[-1].split())


def test_what_reads_files_only_needs_no_torch(shelf, tmp_path):
    """Digests are read, and masks are compared and stored again, without torch or transformers."""
    for words in (
        ["inspect", shelf / "one"],
        ["inspect", shelf / "one" / "mask.safetensors", "--json"],
        ["diff", shelf / "one", shelf / "two"],
        ["pack", shelf / "one", "--encoding", "entropy", "--output", tmp_path / "packed"],
    ):
        done, imported = run_and_see_imports(words)
        assert done.returncode == 0, done.stderr
        assert "numpy" in imported
        assert not {"torch", "transformers"} & imported, words
    assert verify_ticket(tmp_path / "packed").encoding == "entropy"
    done, imported = run_and_see_imports(["inspect", tmp_path / "nothing"])
    assert done.returncode == 1
    assert not {"torch", "transformers"} & imported


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"hf_slt {hf_slt.__version__}\n", "")


def test_without_a_command_there_is_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    out = capsys.readouterr().out
    assert not ended.value.code
    assert out.startswith("usage: slt")
    for command in "inspect verify diff combine pack merge generate evaluate curvature push".split():
        assert f"\n    {command}" in out
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: slt {command}")
