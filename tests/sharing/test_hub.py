"""Tickets to and from a Hub on loopback, with the real client, by LFS and by Xet; and all that may go wrong.

Every client is an interpreter of its own: `huggingface_hub` reads the address of the Hub when it is imported.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import tiny_config, train_a_little
from loopback_hub import LoopbackHub

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.sharing.card import write_card
from hf_slt.text.blocks import train_tokenizer
from hf_slt.tickets.format import read_header

pytest.importorskip("jinja2")  # for the card
ROOT = Path(__file__).parents[2]
SLT = Path(sys.executable).with_name("slt")
IDS = torch.arange(12).view(1, 12)
TICKET = set(
    "mask.safetensors model.safetensors.index.json config.json generation_config.json README.md "
    "tokenizer.json tokenizer_config.json masks.png load_with_hf_slt.py".split()
)

README = (ROOT / "README.md").read_text()
# The README's own words, after its own first ones; only the folder is another.
(SHARING,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "push_to_hub" in block)
IMPORTS = "from hf_slt import SupermaskGPT2LMHeadModel\nfrom transformers import AutoModelForCausalLM\n"
SHARING = IMPORTS + SHARING.replace("model_cards/pocket", "runs/ticket")


@dataclass
class Client:
    """Somebody's machine: a home with a cache and a token, and an address of the Hub."""

    hub: LoopbackHub
    home: Path
    xet: bool = False
    shells: dict[str, subprocess.Popen] = field(default_factory=dict)

    def options(self, changes: dict[str, str]) -> dict:
        self.home.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home),
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_MODULES_CACHE": str(self.home / "modules"),
            "HF_XET_CACHE": str(self.home / "xet"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": str(int(not self.xet)),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": "me-token",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **changes,
        }
        return {"env": environment, "cwd": self.home, "text": True, "stdout": subprocess.PIPE}

    def run(self, words: list, **changes: str) -> str:
        """What a command prints; it must go well."""
        options = self.options(changes) | {"stderr": subprocess.PIPE}
        run = subprocess.run(list(map(str, words)), check=False, **options)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def slt(self, *words, **changes: str) -> str:
        """The command, as it is installed."""
        command = [SLT] if SLT.exists() else [sys.executable, "-m", "hf_slt.cli"]
        return self.run([*command, *words], **changes)

    def python(self, script: str, *words, **changes: str) -> str:
        return self.run([sys.executable, "-c", script, *words], **changes)

    def commands(self, *commands: list, **changes: str) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of `slt` commands, all in one interpreter, which is kept for more."""
        key = json.dumps(changes)
        if key not in self.shells:
            options = self.options(changes) | {"stdin": subprocess.PIPE}
            self.shells[key] = subprocess.Popen([sys.executable, "-c", SHELL], **options)
        shell = self.shells[key]
        print(json.dumps([list(map(str, command)) for command in commands]), file=shell.stdin, flush=True)
        return json.loads(shell.stdout.readline())

    def leave(self) -> None:
        for shell in self.shells.values():
            shell.communicate()  # the end of its input is the end of it


SHELL = """
import contextlib, io, json, os, sys, time
sys.argv = ["slt"]
time.sleep = lambda seconds: None  # the client waits before it tries again
from hf_slt.cli import main
for line in sys.stdin:
    results = []
    for command in json.loads(line):
        os.environ["HF_TOKEN"] = "me-token"
        if command[0].startswith("HF_TOKEN="):  # as in a shell
            os.environ["HF_TOKEN"] = command.pop(0).removeprefix("HF_TOKEN=")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(command)
        results.append((code, out.getvalue(), err.getvalue()))
    print(json.dumps(results), flush=True)
"""


@dataclass
class Local:
    """The tickets on the author's machine, and what they say."""

    runs: Path
    logits: dict[str, np.ndarray]
    texts: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Local:
    runs, logits, texts = tmp_path_factory.mktemp("author") / "runs", {}, {}
    for name, steps in {"ticket": 3, "poems": 6}.items():  # the scores are those of the last
        torch.manual_seed(0)
        model = SupermaskGPT2LMHeadModel(tiny_config(vocab_size=300, density=0.3))
        train_a_little(model, steps).save_pretrained(runs / "scores")
        model = model.to_ticket()
        model.save_ticket(runs / name)
        train_tokenizer(["The mask of a seed. " * 9], 300, 64).save_pretrained(runs / name)
        with torch.no_grad():
            logits[name] = model(IDS).logits.numpy()
        texts[name] = model.generate(IDS, max_new_tokens=8, do_sample=False).numpy()
    assert not np.array_equal(logits["ticket"], logits["poems"])
    folder = runs / "ticket"
    (folder / "masks.png").write_bytes(b"a picture")
    write_card(folder, name=str(folder))
    # what else may lie there
    for name in ("optimizer.pt", "train.py", "log.jsonl", ".env", "notes.png"):
        (folder / name).write_text("mine")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "config.json").write_text("{}")
    return Local(runs, logits, texts)


@dataclass
class Shared:
    """A Hub with tickets that were pushed in all ways, who pushed them, and what the commands printed."""

    hub: LoopbackHub
    author: Client
    answers: dict[str, str]

    def visit(self, name: str) -> Client:
        return Client(self.hub, self.author.home.with_name(name), self.author.xet)


PUSH = """
import sys
exec(sys.argv[1])
print(model.active_mask)
model.set_mask("default")
options = {"private": True, "commit_message": "Smaller", "tags": ["tiny"]}
print(model.push_to_hub("me/small", encoding="entropy", **options))
model.generation_config.max_new_tokens = 7
model.push_to_hub("me/small", encoding="entropy", revision="short")
try:
    model.push_to_hub("me/small", privat=True)
except TypeError as error:
    assert "privat" in str(error)
else:
    raise AssertionError("a misspelled option was taken")
SupermaskGPT2LMHeadModel.from_pretrained("runs/scores").push_to_hub("me/training")
"""


@pytest.fixture(scope="module", params=["lfs", pytest.param("xet", marks=pytest.mark.exhaustive)])
def shared(request, local, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with LoopbackHub(folder) as hub:
        author = Client(hub, folder / "author", xet=request.param == "xet")
        hub.put("me/ticket", {"model.safetensors": b"of an earlier push", "notes.txt": b"somebody's"})
        author.home.mkdir()
        (author.home / "runs").symlink_to(local.runs)
        runs, answers = Path("runs"), {}
        answers["poems"] = author.slt("push", runs / "poems", "me/poems")
        author.slt("push", runs / "ticket", "me/training", "--encoding", "entropy")  # scores will follow
        answers["push"] = author.python(PUSH, SHARING)
        options = ["--private", "--message", "By hand", "--token", "me-token"]
        answers["private"] = author.slt("push", runs / "ticket", "me/private", *options, HF_TOKEN="")
        answers["v2"] = author.slt("push", runs / "poems", "me/ticket", "--revision", "v2")
        yield Shared(hub, author, answers)
        author.leave()


# -- push -----------------------------------------------------------------------------------------


def test_exactly_the_ticket_is_pushed(shared, local):
    hub = shared.hub
    by_model, by_command = hub.files("me/ticket"), hub.files("me/private")
    assert set(by_command) == TICKET
    assert set(by_model) == TICKET | {"notes.txt"}  # the stale weights are gone, what is not ours is not
    for name in TICKET - {"README.md", "config.json"}:
        assert by_model[name].oid == by_command[name].oid, name
    assert set(hub.files("me/poems")) == TICKET - {"masks.png"}  # a card was written, though there was none
    for name, blob in by_command.items():
        assert blob.large == name.endswith((".safetensors", ".png"))
        assert bool(blob.xet) == (blob.large and shared.author.xet)
        if name not in ("README.md", "config.json"):
            assert blob.size == (local.runs / "ticket" / name).stat().st_size
    assert bool(hub.uploads) != shared.author.xet


def test_options_of_a_push(shared):
    hub = shared.hub
    private = {name for name, repo in hub.repos.items() if repo.private}
    assert private == {"me/small", "me/private"}
    digest = hub.commits("me/ticket")[-1].removeprefix("Ticket ")
    assert re.fullmatch(r"[0-9a-f]{8}", digest)
    assert hub.commits("me/private") == ["By hand"]
    assert hub.commits("me/small") == ["Smaller"]
    card = hub.files("me/small")["README.md"].data.decode()
    assert "- tiny\n" in card
    assert "- supermask\n" in card
    assert hub.commits("me/ticket", "v2")[-1] == hub.commits("me/poems")[-1] != f"Ticket {digest}"
    used, small = shared.answers["push"].split()
    assert used == "poems"
    assert small == f"{hub.url}/me/small/commit/{hub.repos['me/small'].branches['main'][-1]}"
    assert shared.answers["v2"].strip().endswith(hub.repos["me/ticket"].branches["v2"][-1])


def test_the_card_names_the_ticket_on_the_hub(shared, local):
    for name in ("me/ticket", "me/private", "me/poems"):
        card = shared.hub.files(name)["README.md"].data.decode()
        assert set(re.findall(r'from_pretrained\("([^"]*)"', card)) == {name}
        assert str(local.runs) not in card


def bytes_in_card(card: str) -> set[int]:
    found = re.findall(r"^([\d,]+) bytes for|^\| \*\*file\*\* .*\*\*([\d,]+)\*\* \|$", card, re.MULTILINE)
    return {int("".join(one).replace(",", "")) for one in found}


def test_the_card_has_the_bytes_of_the_file_that_was_uploaded(shared):
    """Whether it was pushed as it is, or in another encoding than in the author's folder."""
    for name in ("me/ticket", "me/small", "me/private", "me/poems"):
        files = shared.hub.files(name)
        card = files["README.md"].data.decode()
        assert bytes_in_card(card) == {files["mask.safetensors"].size}
        assert ("masks (entropy)" in card) == (name == "me/small")


def test_a_ticket_is_pushed_in_the_encoding_that_it_was_loaded_in(hub, author):
    """By a model, without a word about encodings: `slt pack` in place has shortened it."""
    shutil.copytree(author.home / "runs" / "ticket", author.home / "short")
    packed = (author.home / "short" / "mask.safetensors").stat().st_size
    author.slt("pack", "short", "--encoding", "entropy")
    size = (author.home / "short" / "mask.safetensors").stat().st_size
    assert size < packed
    assert bytes_in_card((author.home / "short" / "README.md").read_text()) == {size}
    author.python(
        "from hf_slt import *; SupermaskGPT2LMHeadModel.from_pretrained('short').push_to_hub('me/short')"
    )
    files = hub.files("me/short")
    assert files["mask.safetensors"].size == size
    assert bytes_in_card(files["README.md"].data.decode()) == {size}


def test_the_same_push_again_uploads_nothing(shared):
    hub, before = shared.hub, {name: dict(repo.commits) for name, repo in shared.hub.repos.items()}
    hub.requests.clear()
    runs, stored = Path("runs"), {path: path.stat().st_size for path in hub.store.rglob("xorbs/xorbs/*")}
    (one, other) = shared.author.commands(
        ["push", runs / "ticket", "me/ticket"], ["push", runs / "poems", "me/ticket", "--revision", "v2"]
    )
    assert [one[0], other[0]] == [0, 0]
    assert one[1].strip().endswith(hub.repos["me/ticket"].branches["main"][-1])
    assert other[1] == shared.answers["v2"]
    assert hub.asked("POST .*/preupload/")
    assert not hub.asked("^PUT|/commit/")
    assert {path: path.stat().st_size for path in hub.store.rglob("xorbs/xorbs/*")} == stored
    assert {name: dict(repo.commits) for name, repo in hub.repos.items()} == before


# -- pull -----------------------------------------------------------------------------------------

LOOK = """
import sys
import numpy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
found = {}
def look(label, model):
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        found[label] = model(ids).logits.numpy()
    found["text of " + label] = model.generate(ids, max_new_tokens=8, do_sample=False).numpy()
"""
PULL = f"""{LOOK}
import hf_slt
from huggingface_hub import ModelCard
model = AutoModelForCausalLM.from_pretrained("me/ticket")
look("ticket", model)
look("ticket, small", AutoModelForCausalLM.from_pretrained("me/small"))
look("poems, revision", AutoModelForCausalLM.from_pretrained("me/ticket", revision="v2"))
scores = hf_slt.SupermaskGPT2LMHeadModel.from_pretrained("me/training")  # beside a ticket pushed before
look("poems, scores", scores)
assert all(parameter.requires_grad for parameter in scores.parameters())
short = hf_slt.SupermaskGPT2LMHeadModel.from_pretrained("me/small", revision="short")
print(short.generation_config.max_new_tokens, model.generation_config.max_new_tokens)
look("poems, mask=", AutoModelForCausalLM.from_pretrained("me/ticket", mask="me/poems"))
model.load_mask("me/poems", "poems")
model.load_mask("me/ticket", "v2", revision="v2")
with model.using_mask("poems"):
    look("poems, load_mask", model)
with model.using_mask("v2"):
    look("poems, load_mask revision", model)
look("ticket, after", model)
print(pipeline("text-generation", "me/ticket")("The", max_new_tokens=3, do_sample=False)[0]["generated_text"])
card = ModelCard.load(sys.argv[2]).content
exec(card.split("```python")[1].split("```")[0])
numpy.savez(sys.argv[1], **found)
"""
STRANGER = f"""{LOOK}
options = dict(trust_remote_code=True)
assert "hf_slt" not in sys.modules
look("ticket", AutoModelForCausalLM.from_pretrained("me/ticket", **options))
look("poems, revision", AutoModelForCausalLM.from_pretrained("me/ticket", revision="v2", **options))
look("ticket, small", AutoModelForCausalLM.from_pretrained("me/small", **options))  # entropy-coded
model = AutoModelForCausalLM.from_pretrained("me/ticket", **options)
assert type(model).__module__ == "hf_slt.models.gpt2", type(model)
tokenizer = AutoTokenizer.from_pretrained("me/ticket")
print(tokenizer.decode(model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=3)[0]))
model.load_mask("me/poems", "poems")
with model.using_mask("poems"):
    look("poems, load_mask", model)
numpy.savez(sys.argv[1], **found)
"""
WITHOUT = """
import sys

class Missing:  # as where it is not installed
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_slt":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from transformers import AutoModelForCausalLM
for options in ({"trust_remote_code": True}, {"trust_remote_code": False}):
    try:
        AutoModelForCausalLM.from_pretrained("me/ticket", **options)
    except (ImportError, ValueError) as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


def check(local: Local, path: Path, looks: int) -> None:
    found = np.load(path)
    assert len(found.files) == 2 * looks
    for label in found.files:
        name = re.split(r",| of ", label.removeprefix("text of "))[0]
        expected = local.texts[name] if label.startswith("text of ") else local.logits[name]
        np.testing.assert_array_equal(found[label], expected, err_msg=label)


@pytest.mark.slow
def test_pull_with_the_package(shared, local):
    client = shared.visit("with")
    text = client.python(PULL, client.home / "found.npz", "me/ticket").splitlines()
    check(local, client.home / "found.npz", 8)
    assert text.pop(0) == "7 None"
    assert [line.startswith("The") for line in text[:2]] == [True, True]  # the pipeline's, and the card's
    if shared.author.xet:
        return  # what is in the cache is the same
    shared.hub.requests.clear()
    card = next(client.home.glob("hub/models--me--ticket/snapshots/*/README.md"))
    again = client.python(PULL, client.home / "again.npz", card, HF_HUB_OFFLINE="1")
    check(local, client.home / "again.npz", 8)
    assert again.splitlines()[1:] == text
    assert not shared.hub.requests


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["lfs"], indirect=True)  # code does not come by Xet
def test_pull_with_trust_remote_code(shared, local):
    """By somebody who has the package but never imports it, as tools of others do."""
    client = shared.visit("trusting")
    text = client.python(STRANGER, client.home / "found.npz")
    check(local, client.home / "found.npz", 4)
    assert text.startswith("The")
    # and later, when no Hub is there
    gone = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    again = client.python(STRANGER, client.home / "again.npz", **gone)
    check(local, client.home / "again.npz", 4)
    assert again == text


@pytest.mark.parametrize("shared", ["lfs"], indirect=True)
def test_pull_without_the_package_says_what_to_install(shared):
    trusted, untrusted = shared.visit("without").python(WITHOUT).splitlines()
    assert trusted.startswith("ImportError")
    assert "pip install hf_slt" in trusted
    assert untrusted.startswith("ValueError")
    assert "trust_remote_code=True" in untrusted


def test_slt_reads_from_the_hub(shared, local):
    client = shared.visit("reader")
    header = read_header(local.runs / "ticket" / "mask.safetensors")
    assert header.digest in client.slt("verify", "me/ticket")
    commands = [
        ["verify", "me/small"],
        ["inspect", "me/small", "--json"],
        ["inspect", "me/ticket", "--revision", "v2", "--json"],
        ["diff", "me/ticket", "me/small", "--json"],
    ]
    results = client.commands(*commands)
    assert [code for code, _, _ in results] == [0] * 4, results
    small, v2, same = (json.loads(out) for _, out, _ in results[1:])
    assert (small["mask_digest"], small["encoding"]) == (header.mask_digest, "entropy")
    assert v2["mask_digest"] == read_header(local.runs / "poems" / "mask.safetensors").mask_digest
    assert same["all"]["hamming"] == 0
    shared.hub.requests.clear()
    assert client.commands(*commands, HF_HUB_OFFLINE="1") == results
    assert not shared.hub.requests
    client.leave()


# -- what may go wrong ----------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path):
    with LoopbackHub(tmp_path) as hub:
        yield hub


@pytest.fixture
def author(request, hub, tmp_path, local):
    client = Client(hub, tmp_path / "author", xet=getattr(request, "param", "lfs") == "xet")
    client.home.mkdir()
    (client.home / "runs").symlink_to(local.runs)
    yield client
    client.leave()


@pytest.fixture
def reader(hub, tmp_path, author):
    client = Client(hub, tmp_path / "reader", author.xet)
    yield client
    client.leave()


by_both_ways = pytest.mark.parametrize("author", ["lfs", "xet"], indirect=True)


def refused(results: list) -> list[str]:
    """The lines on stderr, one for each command."""
    for code, out, err in results:
        assert (code, out) == (1, ""), (code, out, err)
        assert err.startswith("slt: "), err
        assert err.count("\n") == 1, err
    return [err[5:-1] for _, _, err in results]


def test_no_permission_and_no_such_name(hub, author):
    push = ["push", "runs/ticket"]
    author.commands([*push, "me/ticket"], [*push, "me/secret", "--private"])
    before = {name: list(repo.commits) for name, repo in hub.repos.items()}
    lines = refused(
        author.commands(
            [*push, "you/ticket"],
            [*push, "me/ticket", "--token", "you-token"],
            [*push, "me/ticket", "--revision", "v2", "--token", "you-token"],
            ["HF_TOKEN=you-token", *push, "me/ticket"],
            [*push, "me/ticket", "--token", "nonsense"],
            ["HF_TOKEN=nonsense", "verify", "me/secret"],
            ["HF_TOKEN=", *push, "me/new"],
            ["verify", "me/nothing"],
            ["HF_TOKEN=", "inspect", "me/nothing"],
            ["HF_TOKEN=you-token", "inspect", "me/secret"],
            ["verify", "me/ticket", "--revision", "v3"],
            ["push", "runs/nothing", "me/new"],
            ["inspect", "runs/nothing/at/all"],
        )
    )
    for line in lines[:4]:
        assert re.match(r"no permission on the Hub \(.*\); use a token with write permission", line)
    assert '"you"' in lines[0]
    for line in lines[4:6]:
        assert line.startswith("the Hub does not accept the token (Invalid credentials")
    for line in lines[6:10]:
        assert re.match(
            r"(me/\w+: )?no such name on the Hub, or no permission \(.*\); check the name, and the token",
            line,
        )
    assert lines[7].startswith("me/nothing: ")
    assert lines[10] == "no such branch, tag or commit on the Hub (Invalid rev id: v3)"
    assert lines[11] == "runs/nothing: no such folder"
    assert lines[12] == "runs/nothing/at/all: no such folder, and not a name on the Hub (such as me/ticket)"
    assert {name: list(repo.commits) for name, repo in hub.repos.items()} == before


def test_no_ticket_there_and_no_hub(hub, author):
    hub.put("me/stock", {"config.json": b"{}"})
    hub.put("me/empty", {})
    lines = refused(author.commands(["verify", "me/stock"], ["inspect", "me/empty"]))
    for name, line in zip(("me/stock", "me/empty"), lines, strict=True):
        assert line == f"{name}: no ticket there: the Hub has neither mask.safetensors nor model.safetensors"
    commands = [["push", "runs/ticket", "me/ticket"], ["verify", "me/ticket"], ["evaluate", "me/ticket"]]
    lines = refused(author.commands(*commands, HF_ENDPOINT="http://127.0.0.1:9"))
    for line in lines:
        assert "Connection refused" in line
        assert line.endswith("try again")
    assert [line.startswith("me/ticket: no such folder here") for line in lines] == [False, True, True]
    for line in refused(author.commands(*commands, HF_HUB_OFFLINE="1")):
        assert "HF_HUB_OFFLINE" in line


@by_both_ways
def test_a_push_that_is_cut(hub, author):
    push, reads = ["push", "runs/ticket", "me/ticket"], ["verify", "me/ticket"]
    # in the upload of the masks (by Xet it does not pass through our hands), in the commit, or at the start
    for place in ("PUT", "/commit/", "/repos/create")[author.xet :]:
        hub.cut[:] = [place] * 20  # the client may try again
        (code, _, said), unread = author.commands(push, reads)
        assert code == 1
        assert 0 < len(hub.cut) < 20
        line = said.splitlines()[-1]  # the client may have printed of its attempts
        assert re.match(r"slt: .* The connection failed or was cut \(.*\); try again", line)
        assert bool(re.search(r"uploading '(mask\.safetensors|masks\.png)'", line)) == (place == "PUT")
        assert "Traceback" not in said
        assert "no such name" in unread[2] or "no ticket there" in unread[2]
        assert not hub.repos.get("me/ticket") or hub.commits("me/ticket") == []
    hub.cut[:] = [] if author.xet else ["PUT"]  # once: the client tries again by itself
    assert [code for code, _, _ in author.commands(push, reads)] == [0, 0]
    assert set(hub.files("me/ticket")) == TICKET
    assert len(hub.commits("me/ticket")) == 1
    before = hub.files("me/ticket")
    # over an older ticket: that one stays whole
    hub.cut[:] = ["/commit/"]
    results = author.commands(["push", "runs/poems", "me/ticket"], reads)
    assert [code for code, _, _ in results] == [1, 0]
    assert hub.files("me/ticket") == before


DAMAGED = f"""{LOOK}
import hf_slt
for name in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(name)
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0])
    else:
        raise SystemExit(name + " was loaded")
"""


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@pytest.mark.slow
def test_a_ticket_damaged_on_the_server_is_refused(hub, author, reader):
    names = ("me/bit", "me/short", "me/header", "me/small")
    results = author.commands(
        *(
            ["push", "runs/ticket", name, "--encoding", "entropy" if name == "me/small" else "packed"]
            for name in names
        )
    )
    assert [code for code, _, _ in results] == [0] * 4
    harm = {
        "me/bit": lambda data: flip(data, len(data) - 100),
        "me/short": lambda data: data[: len(data) * 3 // 5],
        "me/header": lambda data: flip(data, 600),
        "me/small": lambda data: flip(data, len(data) - 100),
    }
    for name in names:
        blob = hub.files(name)["mask.safetensors"]
        blob.data = harm[name](blob.data)
        blob.size = len(blob.data)
    for name, line in zip(
        names, refused(reader.commands(*(["verify", name] for name in names))), strict=True
    ):
        assert re.search(r"mask\.safetensors: .*(damaged|truncated|digest|decoded|download)", line), (
            name,
            line,
        )
    lines = reader.python(DAMAGED, *names).splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "TicketError"] for name in names]
    assert all("mask.safetensors: " in line for line in lines)


def test_a_file_that_ends_too_soon_is_not_kept(hub, author, reader):
    author.commands(["push", "runs/ticket", "me/ticket"])
    blob = hub.files("me/ticket")["mask.safetensors"]
    whole, blob.data = blob.data, blob.data[:-1000]  # but the Hub says that it is longer
    ((code, _, said),) = reader.commands(["verify", "me/ticket"])
    assert code == 1
    assert "Traceback" not in said
    blob.data = whole
    assert reader.commands(["verify", "me/ticket"])[0][0] == 0


def test_a_pull_request(hub, author):
    hub.put("you/ticket", {"README.md": b"---\\nx: 1\\n---\\n"})
    ((code, out, err),) = author.commands(["push", "runs/ticket", "you/ticket", "--create-pr"])
    assert (code, out.strip()) == (0, f"{hub.url}/you/ticket/discussions/1"), err
    assert set(hub.files("you/ticket", "refs/pr/1")) == TICKET
    assert set(hub.files("you/ticket")) == {"README.md"}
    assert author.slt("verify", "you/ticket", "--revision", "refs/pr/1")


def test_a_page_beside_the_ticket(hub, author, local):
    """It holds the ticket's own bytes, the card links it, and a push of the same changes nothing."""
    push = ["push", "runs/ticket", "me/paged", "--page"]
    for code, _, err in author.commands(push, push):
        assert code == 0, err
    files = hub.files("me/paged")
    assert set(files) == TICKET | {"index.html"}
    page, card = files["index.html"].data.decode(), files["README.md"].data.decode()
    assert base64.b64encode((local.runs / "ticket" / "mask.safetensors").read_bytes()).decode() in page
    assert "me/paged" in page
    assert card.count("](index.html)") == 1
    assert len(set(hub.repos["me/paged"].branches["main"])) == 2  # the first commit is the repository's own
    # Without a tokenizer there is no page, and nothing is made on the Hub.
    bare = author.home / "bare"
    shutil.copytree(local.runs / "ticket", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    (line,) = refused(author.commands(["push", "bare", "me/bare", "--page"]))
    assert "tokenizer" in line
    assert "me/bare" not in hub.repos


@pytest.mark.parametrize("author", ["xet"], indirect=True)
def test_a_xet_storage_that_is_damaged(hub, author, reader):
    author.commands(["push", "runs/ticket", "me/ticket"])
    stored = [path for path in hub.store.rglob("xorbs/xorbs/default.*") if path.suffix != ".tagset"]
    assert stored
    for path in stored:
        path.chmod(0o600)
        path.write_bytes(flip(path.read_bytes(), 6000))
    (line,) = refused(reader.commands(["verify", "me/ticket"]))
    assert re.search(r"mask\.safetensors: .* has digest .* damaged", line)
