"""Files that are there whole or not at all: kills, two writers, leftovers, and links laid in the way."""

import os
import threading
from pathlib import Path

import pytest
from kills import kills, loads_as, logits_of, make_model, plans, run_killed, stops_everywhere

from hf_slt import SupermaskGPT2LMHeadModel, TicketError, verify_ticket
from hf_slt.model.ticket import next_folder
from hf_slt.sharing import hub
from hf_slt.sharing.files import replacing, staged
from hf_slt.sharing.saving import rewrite_ticket


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".py"}


MODELS = {"one": make_model(1), "two": make_model(2, layer_norm_epsilon=1e-3)}
LOGITS = {name: logits_of(model) for name, model in MODELS.items()}


def saved(name, folder, how):
    model = MODELS[name]
    match how:
        case "scores":
            model.save_pretrained(folder)
        case "saved":
            model.to_ticket().save_pretrained(folder)
        case "pack":
            rewrite_ticket(folder, folder, encoding="entropy")
        case encoding:
            model.save_ticket(folder, encoding=encoding)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("packed", "saved"),
        pytest.param("packed", "entropy", marks=pytest.mark.slow),
        pytest.param("saved", "packed", marks=pytest.mark.slow),
        pytest.param("packed", "pack", marks=pytest.mark.slow),
        pytest.param("scores", "scores", marks=pytest.mark.slow),
    ],
)
def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path, old, new):
    folder = tmp_path / "ticket"
    found = []
    after = "one" if new == "pack" else "two"
    for _ in stops_everywhere(folder, lambda: saved("one", folder, old), lambda: saved(after, folder, new)):
        found.append(loads_as(folder, LOGITS, ticket=old != "scores"))
        (folder / "notes.txt").write_text("mine")
        saved("one", folder, old)  # the next writer ends it, and leaves nothing behind
        assert loads_as(folder, LOGITS, ticket=old != "scores") == "one"
        assert not [name for name in names(folder) | names(tmp_path) if name.startswith(".")]
        assert (folder / "notes.txt").read_text() == "mine"
    assert found == sorted(found)  # first always the old, then always the new
    assert len(found) > 10
    assert {*found} == {"one", after}


def test_a_new_folder_is_not_there_or_whole(tmp_path):
    folder, found = tmp_path / "ticket", []
    for _ in stops_everywhere(folder, lambda: None, lambda: saved("one", folder, "packed")):
        found.append(loads_as(folder, LOGITS) if folder.exists() else "")
    assert found == sorted(found)
    assert {*found} == {"", "one"}
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["saves", "packing"])
def test_kills_at_random_moments(tmp_path, what):
    folder = tmp_path / "ticket"
    writes, known = plans(folder)
    for _ in kills(20, folder, writes[what]):
        assert loads_as(folder, known) in known


def test_two_savers_of_one_folder(tmp_path):
    """Threads, which the lock keeps apart as it does processes; new at first, and then overwritten."""
    folder, errors = tmp_path / "ticket", []

    def save(name):
        try:
            for encoding in ("packed", "entropy", "packed", "saved"):
                saved(name, folder, encoding)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert loads_as(folder, LOGITS) in LOGITS
    assert not [name for name in names(folder) | names(tmp_path) if name.startswith(".")]


def test_a_writer_that_lives_keeps_its_folder(tmp_path):
    with staged(tmp_path / "ticket") as slow:
        (slow / "config.json").write_text("slow")
        with staged(tmp_path / "ticket") as fast:
            (fast / "config.json").write_text("fast")
        assert (tmp_path / "ticket" / "config.json").read_text() == "fast"
    assert (tmp_path / "ticket" / "config.json").read_text() == "slow"
    assert [path.name for path in (tmp_path / "ticket").iterdir()] == ["config.json"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    def write(text):
        with replacing(tmp_path / "a.txt") as path:
            path.write_text(text)

    assert run_killed(lambda: write("half"), 2)
    assert [name for name in names(tmp_path) if name.startswith(".a.txt-")]
    write("whole")
    assert names(tmp_path) == {"a.txt"}
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for name in ("a.txt", f".a.txt.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(secret)
    with replacing(tmp_path / "a.txt") as path:
        path.write_text("new")
    assert secret.read_text() == "secret"
    assert not (tmp_path / "a.txt").is_symlink()
    folder = tmp_path / "ticket"
    folder.mkdir()
    (folder / "mask.safetensors").symlink_to(secret)
    (folder / "config.json").symlink_to(secret)
    MODELS["one"].save_ticket(folder)
    assert secret.read_text() == "secret"
    assert loads_as(folder, LOGITS) == "one"


def test_links_of_a_folder_are_not_copied(tmp_path, caplog):
    """A stranger's README.md may lead to anything of the user's; pack and push would publish it."""
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "ticket"
    MODELS["one"].save_ticket(folder)
    (folder / "README.md").symlink_to(tmp_path / "secret")
    (folder / "notes.txt").write_text("mine")
    rewrite_ticket(folder, tmp_path / "packed")
    assert "README.md is a link, and is not copied" in caplog.text
    assert names(tmp_path / "packed") == names(folder) - {"README.md"}
    # In the cache of the Hub every file is a link, to the folder of all contents of this repository.
    snapshot, blobs = (
        tmp_path / "models--me--ticket" / "snapshots" / "abc",
        tmp_path / "models--me--ticket" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        if not path.is_symlink():
            (blobs / str(number)).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "README.md").symlink_to(tmp_path / "secret")
    rewrite_ticket(snapshot, tmp_path / "cached")
    assert names(tmp_path / "cached") == names(tmp_path / "packed")


def test_links_of_a_folder_are_not_pushed(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    folder, pushed = tmp_path / "ticket", {}
    MODELS["one"].save_ticket(folder)
    (folder / "README.md").symlink_to(tmp_path / "secret")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    (folder / "vocab.json").write_text("{}")
    model = SupermaskGPT2LMHeadModel.from_pretrained(folder)
    monkeypatch.setattr(
        hub, "push_ticket", lambda stage, name, **options: pushed.update({name: names(Path(stage))})
    )
    hub.push_model(model, "me/ticket")
    assert "vocab.json" in pushed["me/ticket"]
    assert not pushed["me/ticket"] & {"README.md", "tokenizer.json"}


def test_files_laid_where_a_save_puts_its_own_are_checked_like_all(tmp_path):
    """A mask of another ticket is refused there too; and nothing of a link is taken."""
    for name in MODELS:
        MODELS[name].save_ticket(tmp_path / name)
    laid = next_folder(tmp_path / "one")
    laid.mkdir()
    (laid / "mask.safetensors").write_bytes((tmp_path / "two" / "mask.safetensors").read_bytes())
    for load in (verify_ticket, SupermaskGPT2LMHeadModel.from_pretrained):
        with pytest.raises(TicketError):
            load(tmp_path / "one")
    (tmp_path / "secret").write_text("secret")
    (laid / "README.md").symlink_to(tmp_path / "secret")
    MODELS["one"].save_ticket(tmp_path / "one")
    assert loads_as(tmp_path / "one", LOGITS) == "one"
    assert "README.md" not in names(tmp_path / "one")
