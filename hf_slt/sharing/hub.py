"""Tickets to and from the Hub.

What is pushed is the ticket and nothing else that lies in its folder: masks, configuration, the code that
loads them, tokenizer, card and its figures. The same ticket pushed twice changes nothing.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    snapshot_download,
    try_to_load_from_cache,
)
from transformers import PreTrainedModel

from ..model.ticket import (
    CONFIG_FILE,
    INDEX_FILE,
    MASK_FILE,
    MODEL_FILE,
    TicketError,
    read_header,
)
from .card import CARD_FILE, FIGURES, PAGE_FILE, link_page, rename_card, write_card
from .files import WEIGHT_FILES, copy_own_file
from .saving import rewrite_ticket
from .verify import mask_path, verified_ticket

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model chat_template.jinja"
).split()
# All that is pushed and fetched; anything else in a folder is somebody's own.
TICKET_FILES = [MASK_FILE, INDEX_FILE, CONFIG_FILE, "generation_config.json", CARD_FILE]
TICKET_FILES += [*FIGURES, *TOKENIZER_FILES]  # and the code that config.json names


def fetch_ticket(
    source: str | os.PathLike, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The folder of a ticket: `source` itself, or the Hub's copy of that name in the cache.

    A mask file stands for the folder it lies in.
    """
    path, name = Path(source), str(source)
    if path.is_file() and path.name in (MASK_FILE, MODEL_FILE):
        return path.parent
    if path.exists():
        return path
    if "/" not in name:
        raise TicketError(f"{source}: no such folder, and no name on the Hub (such as me/ticket)")
    patterns = [*TICKET_FILES, MODEL_FILE, "*.py"]
    with _asking_hub(name):
        folder = Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns))
    if not mask_path(folder).is_file():
        raise TicketError(f"{source}: no ticket there: the Hub has neither {MASK_FILE} nor {MODEL_FILE}")
    return folder


def refuse_missing(name: str) -> None:
    """Raise for a model that is neither a folder, nor in the cache, nor on the Hub: at once.

    `from_pretrained` would ask the Hub for minutes, and say little of a folder.
    """
    if not Path(name).exists():
        with _asking_hub(name):
            if try_to_load_from_cache(name, CONFIG_FILE) is None:
                HfApi().model_info(name)


@contextmanager
def _asking_hub(name: str) -> Iterator[None]:
    """Refuse what is meant as a folder; if the Hub does not answer, say that there is no folder either."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise TicketError(f"{name}: no such folder, and no name on the Hub (such as me/ticket)")
    if "/" in name and (parent := Path(name).parent).is_dir():
        raise TicketError(f"{name}: no such folder; {parent} is one, so that no name on the Hub is meant")
    try:
        yield
    except Exception as error:
        for one in (error, error.__cause__):  # errors of the Hub's own HTTP client
            if type(one).__module__.startswith("httpx") and type(one).__name__ != "HTTPStatusError":
                raise RuntimeError(f"{name}: no such folder here, and no answer from the Hub.") from one
        raise


def push_ticket(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    encoding: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    tags: list[str] | None = None,
    max_shard_size: int | str | None = None,
    page: str | None = None,
) -> str:
    """Upload a ticket's folder, after checking it; returns the address of the commit, or of the request.

    encoding: how the uploaded file stores its masks; by default as the folder's.
    private: of a new repository; None takes the owner's default.
    revision: branch to push to, made if it is not there; by default main.
    tags: more tags for the card.
    max_shard_size: transformers passes it on; a ticket is one file, whatever it is.
    page: text of a page that runs the ticket in a browser; the card will link it.
    """
    ticket = verified_ticket(folder)
    header = ticket.header
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as stage:
        rewrite_ticket(folder, stage, encoding=encoding or header.encoding, verified=ticket)
        card = Path(stage) / CARD_FILE
        if card.is_file():  # it may name the folder it was trained in
            card.write_text(rename_card(card.read_text("utf-8"), repo_id), "utf-8")
        else:
            write_card(stage, name=repo_id, header=header)
        if tags:
            tagged = ModelCard.load(card)
            tagged.data.tags = list(dict.fromkeys([*(tagged.data.tags or []), *tags]))
            tagged.save(card)
        names = {*TICKET_FILES, *_code_files(Path(stage))}
        if page is not None:
            (Path(stage) / PAGE_FILE).write_text(page, "utf-8")
            card.write_text(link_page(card.read_text("utf-8")), "utf-8")
            names.add(PAGE_FILE)
        files = [path for path in sorted(Path(stage).iterdir()) if path.name in names]
        # of an earlier push: would be loaded in place of the masks
        there = api.list_repo_files(repo_id, revision=revision)
        stale = sorted(name for name in there if name not in names and re.fullmatch(WEIGHT_FILES, name))
        # One commit, so that nobody ever sees half a ticket; upload_folder may make several.
        commit = api.create_commit(
            repo_id,
            [CommitOperationAdd(path.name, path) for path in files]
            + [CommitOperationDelete(name) for name in stale],
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Ticket {header.mask_digest[:8]}",
            commit_description=commit_description,
        )
    return str(commit.pr_url or commit.commit_url)


def push_model(model: Any, repo_id: str, *, encoding: str = "packed", **options: Any) -> str:
    """`push_to_hub` of a model: of a ticket in memory, with what lies where it was loaded from.

    That is the tokenizer; card and figures too, if they are of this very mask.
    """
    if model.config.state != "ticket":
        return PreTrainedModel.push_to_hub(model, repo_id, **options)
    with tempfile.TemporaryDirectory() as folder:
        header, origin = model.save_ticket(folder, encoding=encoding), Path(model.name_or_path or "")
        if model.name_or_path and mask_path(origin).is_file():
            same = read_header(mask_path(origin)).mask_digest == header.mask_digest
            for name in [*TOKENIZER_FILES, *([CARD_FILE, *FIGURES] if same else [])]:
                copy_own_file(origin / name, Path(folder))
        return push_ticket(folder, repo_id, encoding=encoding, **options)


def _code_files(folder: Path) -> set[str]:
    """The modules that config.json names for trust_remote_code, and those that they import."""
    named = json.loads((folder / CONFIG_FILE).read_text()).get("auto_map", {}).values()
    found, wanted = set(), {str(name).rpartition("--")[2].split(".")[0] for name in named}
    while wanted:
        path = folder / f"{wanted.pop()}.py"
        if path.name not in found and path.is_file():
            found.add(path.name)
            wanted |= set(re.findall(r"^\s*from \.(\w+) import", path.read_text("utf-8"), re.MULTILINE))
    return found
