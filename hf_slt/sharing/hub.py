"""Tickets to and from the Hub.

Only the files of the ticket are pushed, and no other files of its folder: masks, configuration, tokenizer, card and
its figures. Pushing the same ticket a second time changes nothing.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    snapshot_download,
    try_to_load_from_cache,
)

from ..errors import TicketError
from ..tickets.files import WEIGHT_FILES
from ..tickets.format import CONFIG_FILE, INDEX_FILE, MASK_FILE, MODEL_FILE
from ..tickets.verify import mask_path, verify_files
from ..tickets.writing import rewrite_ticket
from .card import CARD_FILE, FIGURES, PAGE_FILE, link_page, rename_card, resize_card, write_card

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model chat_template.jinja"
).split()
REMOTE_FILE = "load_with_hf_slt.py"  # imports hf_slt, see hf_slt/models/remote_code.py
REMOTE_TEXT = '''\
"""Loads this model with the package hf_slt, for trust_remote_code=True. It holds no code of its own."""

from hf_slt import {names}  # noqa: F401
'''
# Only these files are pushed and fetched; other files of a folder are private.
TICKET_FILES = [MASK_FILE, INDEX_FILE, CONFIG_FILE, "generation_config.json", CARD_FILE]
TICKET_FILES += [*FIGURES, *TOKENIZER_FILES, REMOTE_FILE]


def fetch_ticket(
    source: str | os.PathLike, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """Find the folder of a ticket, and download it if it is on the Hub.

    Args:
        source (`str` or `os.PathLike`):
            A folder, a mask file (its folder is meant), or a Hub name.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*):
            Token of the Hub.

    Returns:
        `Path`: the folder, which is in the cache if it was downloaded.

    Raises:
        [`TicketError`]: if there is no such folder or name, or no ticket.
    """
    path, name = Path(source), str(source)
    if path.is_file() and path.name in (MASK_FILE, MODEL_FILE):
        return path.parent
    if path.exists():
        return path
    if "/" not in name:
        raise TicketError(f"{source}: no such folder, and not a name on the Hub (such as me/ticket)")
    patterns = [*TICKET_FILES, MODEL_FILE]
    with _asking_hub(name):
        folder = Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns))
    if not mask_path(folder).is_file():
        raise TicketError(f"{source}: no ticket there: the Hub has neither {MASK_FILE} nor {MODEL_FILE}")
    return folder


def refuse_missing(name: str) -> None:
    """Raise at once for a model that is neither a folder, nor in the cache, nor on the Hub.

    `from_pretrained` would ask the Hub for minutes, and would not say that there is no such folder.

    Args:
        name (`str`):
            A folder or a Hub name.

    Raises:
        [`TicketError`]: if it is not a folder, and cannot be a name on the Hub.
        `RuntimeError`: if it is not a folder here, and the Hub does not answer.
    """
    if not Path(name).exists():
        with _asking_hub(name):
            if try_to_load_from_cache(name, CONFIG_FILE) is None:
                HfApi().model_info(name)


@contextmanager
def _asking_hub(name: str) -> Iterator[None]:
    """Raise an error for a name that must be a folder. If the Hub does not answer, say that no folder exists."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise TicketError(f"{name}: no such folder, and not a name on the Hub (such as me/ticket)")
    if "/" in name and (parent := Path(name).parent).is_dir():
        raise TicketError(f"{name}: no such folder; {parent} is a folder, so this is not a name on the Hub")
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
    """Check a ticket's folder and upload the files that the ticket consists of.

    Args:
        folder (`str` or `os.PathLike`):
            The ticket's folder. Other files in it stay where they are.
        repo_id (`str`):
            Name of the repository on the Hub.
        encoding (`str`, *optional*):
            How the uploaded file stores its masks. Default: as in the folder.
        private (`bool`, *optional*):
            Whether a new repository is private. Default: the owner's setting.
        revision (`str`, *optional*):
            Branch to push to. It is made if it does not exist. Default: main.
        commit_message (`str`, *optional*):
            First line of the commit's message.
        commit_description (`str`, *optional*):
            The rest of the commit's message.
        create_pr (`bool`, defaults to `False`):
            Whether to open a pull request instead.
        token (`str` or `bool`, *optional*):
            Token of the Hub.
        tags (`list[str]`, *optional*):
            More tags for the card.
        max_shard_size (`int` or `str`, *optional*):
            Accepted because transformers passes it; a ticket is always one file.
        page (`str`, *optional*):
            Text of a page that runs the ticket in a browser. The card will link it.

    Returns:
        `str`: the address of the commit, or of the pull request.
    """
    ticket = verify_files(folder)
    header = ticket.header
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as stage:
        kept = encoding or header.encoding
        header = rewrite_ticket(folder, stage, encoding=kept, verified=ticket, companions=TICKET_FILES)
        _remove_foreign_code(Path(stage) / REMOTE_FILE)
        card = Path(stage) / CARD_FILE
        resize_card(stage, header)
        if card.is_file():  # it may name the folder it was trained in
            card.write_text(rename_card(card.read_text("utf-8"), repo_id), "utf-8")
        else:
            write_card(stage, name=repo_id, header=header)
        if tags:
            tagged = ModelCard.load(card)
            tagged.data.tags = list(dict.fromkeys([*(tagged.data.tags or []), *tags]))
            tagged.save(card)
        names = {*TICKET_FILES}
        if page is not None:
            (Path(stage) / PAGE_FILE).write_text(page, "utf-8")
            card.write_text(link_page(card.read_text("utf-8")), "utf-8")
            names.add(PAGE_FILE)
        files = [path for path in sorted(Path(stage).iterdir()) if path.name in names]
        # Weight files of an earlier push would be loaded in place of the masks.
        there = api.list_repo_files(repo_id, revision=revision)
        stale = sorted(name for name in there if name not in names and re.fullmatch(WEIGHT_FILES, name))
        # A single commit, so nobody ever sees half a ticket. upload_folder may make several commits.
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


def _remove_foreign_code(path: Path) -> None:
    """Remove a Python file that does more than import hf_slt: nobody should push code that they have not read."""
    pattern = re.escape(REMOTE_TEXT).replace(re.escape("{names}"), r"\w+(, \w+)*")
    if path.is_file() and not re.fullmatch(pattern, path.read_text("utf-8", errors="replace")):
        logger.warning(
            f"{path.name} is not the file that hf_slt writes, and is not pushed; save the ticket again"
        )
        path.unlink()
