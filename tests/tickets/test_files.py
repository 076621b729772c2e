"""Files that are there whole or not at all: kills, two writers, leftovers, and links laid in the way."""

import fcntl
import os
import threading
from pathlib import Path

import pytest
from kills import kills, loads_as, logits_of, make_model, plans, reads, run_killed, stops_everywhere

from hf_slt import SLTError, SupermaskGPT2LMHeadModel, TicketError, verify_ticket
from hf_slt.models import modeling
from hf_slt.tickets import files
from hf_slt.tickets.files import replacing, staged
from hf_slt.tickets.format import next_folder
from hf_slt.tickets.writing import rewrite_ticket


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".py"}


MODELS = {"one": make_model(1), "two": make_model(2, layer_norm_epsilon=1e-3)}
TICKETS = {
    name: model.to_ticket() for name, model in MODELS.items()
}  # not in threads: transformers patches torch
LOGITS = {name: logits_of(model) for name, model in MODELS.items()}


def saved(name, folder, how):
    model = MODELS[name]
    match how:
        case "scores":
            model.save_pretrained(folder)
        case "saved":
            TICKETS[name].save_pretrained(folder)
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
    kill_everywhere(tmp_path, old, new)


@pytest.mark.slow
def test_the_same_where_folders_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "swap_folders", lambda one, other: False)
    kill_everywhere(tmp_path, "packed", "saved")


def kill_everywhere(tmp_path, old, new):
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


def test_all_files_of_a_folder_change_at_once(tmp_path):
    """Tokenizer and generation settings too; other files stay, and a folder within stays."""
    folder, found = tmp_path / "ticket", []

    def write(name):
        with staged(folder) as stage:
            for file in ("config.json", "tokenizer.json", "generation_config.json"):
                (stage / file).write_text(name)

    def old():
        write("old")
        (folder / "notes.txt").write_text("mine")
        (folder / "mask.safetensors").write_text("of old")

    for _ in stops_everywhere(folder, old, lambda: write("new")):
        texts = {path.read_text() for path in folder.glob("*.json")}
        assert len(texts) == 1
        assert (folder / "mask.safetensors").exists() == (texts == {"old"})
        assert (folder / "notes.txt").read_text() == "mine"
        found += texts
    assert found[0] == "old"
    assert found[-1] == "new"
    (folder / "checkpoints").mkdir()
    write("newer")
    assert (folder / "checkpoints").is_dir()
    assert {path.read_text() for path in folder.glob("*.json")} == {"newer"}


def test_a_lock_is_waited_for_with_a_warning_and_for_a_stated_time(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(files, "WARN_SECONDS", 0.05)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.2)
    folder = tmp_path / "ticket"
    folder.mkdir()
    locks = [os.open(one, os.O_RDONLY) for one in (folder, tmp_path)]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    waits = pytest.raises(SLTError, match=r"ticket: another process has been writing .* give another folder")
    with waits, staged(folder) as stage:
        (stage / "config.json").write_text("new")
    assert "ticket: waiting up to" in caplog.text
    os.close(locks[0])
    with staged(folder) as stage:  # the folder above is locked still: it is anybody's
        (stage / "config.json").write_text("new")
    assert (folder / "config.json").read_text() == "new"
    os.close(locks[1])


def test_names_that_are_long_or_those_of_folders(tmp_path):
    long = tmp_path / ("x" * 250)
    for text in ("one", "two"):
        with staged(long) as stage:
            (stage / "config.json").write_text(text)
        with replacing(tmp_path / ("y" * 251 + ".txt")) as path:
            path.write_text(text)
    assert (long / "config.json").read_text() == "two"
    assert len(names(tmp_path)) == 2
    (long / "mask.safetensors").mkdir()
    with pytest.raises(SLTError, match=r"mask.safetensors: a folder where a file of the model belongs"):
        MODELS["one"].save_ticket(long)
    assert (long / "config.json").read_text() == "two"
    (long / "config.json").write_text("{}")
    with pytest.raises(TicketError, match="not a regular file"):
        verify_ticket(long)


def test_a_reader_during_overwrites_reads_one_or_the_other(tmp_path):
    """Two processes write without end; masks, configuration and generation settings are always those of one save."""
    folder = tmp_path / "ticket"
    writes, known = plans(folder)
    writes["saves"][0]()
    assert {*reads(12, folder, writes["saves"], known)} <= {*known}


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
        modeling, "push_ticket", lambda stage, name, **options: pushed.update({name: names(Path(stage))})
    )
    model.push_to_hub("me/ticket")
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
