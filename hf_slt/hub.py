"""A ticket on the Hub: fetched, pushed, and described by a card that is written from facts only.

    facts(ticket's own header, config.json, arguments and log of the run) -> template -> README.md

What is not known is left out: a card has no blanks and no guesses. Names of folders on the machine that
trained are not for the public and are cut to their last part.

What is pushed is the ticket and nothing else that lies in its folder: masks, configuration, the code that
loads them, tokenizer, card and its figures. The same ticket pushed twice changes nothing.
"""

import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    snapshot_download,
)

from .files import replacing
from .ticket import (
    CONFIG_FILE,
    INDEX_FILE,
    MASK_FILE,
    MODEL_FILE,
    WEIGHT_FILES,
    Entry,
    Header,
    TicketError,
    mask_path,
    read_header,
    rewrite_ticket,
    verify_ticket,
)

CARD_FILE = "README.md"
TAGS = ["supermask", "strong-lottery-ticket", "edge-popup", "gpt2"]
# A figure of one of these names, if it lies in the ticket's folder, is shown.
FIGURES = {
    "comparison.png": "Validation loss of the ticket and of its controls",
    "curves.png": "Loss, learning rate, and share of mask bits that flip between two looks",
    "masks.png": "Where the masks keep weights, and how evenly rows and columns share them",
}
EMBEDDED = "embedded corpus (prose of the Python installation)"
LABELS = {"random_mask": "random mask", "dense": "dense twin", "frozen_embeddings": "frozen embeddings"}
METRICS = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
}
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model chat_template.jinja"
).split()
# All that is pushed and fetched; anything else in a folder is somebody's own.
TICKET_FILES = [MASK_FILE, INDEX_FILE, CONFIG_FILE, "generation_config.json", CARD_FILE]
TICKET_FILES += [*FIGURES, *TOKENIZER_FILES]  # and the code that config.json names
_WEIGHTS = re.compile(WEIGHT_FILES)
_AUTO_CLASSES = {  # architecture -> class to load it with, task on the Hub
    "SupermaskGPT2LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "SupermaskGPT2ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "SupermaskGPT2Model": ("AutoModel", "feature-extraction"),
}
_SHAPE = {
    "n_layer": "blocks",
    "n_embd": "width",
    "n_head": "heads",
    "n_positions": "positions",
    "vocab_size": "vocabulary",
    "embedding": "embeddings",
    "layer_norm": "LayerNorm",
}
# Where a run writes and what it shows: no part of what it computes.
_PRIVATE = frozenset("output_dir cache_dir resume overwrite log_with".split())


# -- to and from the Hub ------------------------------------------------------------------------------


def fetch_ticket(
    source: str | os.PathLike, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The folder of a ticket: `source` itself, or the Hub's copy of that name in the cache.

    A mask file stands for the folder it lies in.
    """
    path = Path(source)
    if path.is_file() and path.name in (MASK_FILE, MODEL_FILE):
        return path.parent
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)):
        raise TicketError(f"{source}: no such folder, and no name on the Hub (such as me/ticket)")
    patterns = [*TICKET_FILES, MODEL_FILE, "*.py"]
    folder = Path(snapshot_download(str(source), revision=revision, token=token, allow_patterns=patterns))
    if not mask_path(folder).is_file():
        raise TicketError(f"{source}: no ticket there: the Hub has neither {MASK_FILE} nor {MODEL_FILE}")
    return folder


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
) -> str:
    """Upload a ticket's folder, after checking it; returns the address of the commit, or of the request.

    encoding: how the uploaded file stores its masks; by default as the folder's.
    private: of a new repository; None takes the owner's default.
    revision: branch to push to, made if it is not there; by default main.
    tags: more tags for the card.
    max_shard_size: transformers passes it on; a ticket is one file, whatever it is.
    """
    header = verify_ticket(folder)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as stage:
        rewrite_ticket(folder, stage, encoding=encoding or header.encoding)
        card = Path(stage) / CARD_FILE
        if card.is_file():  # it may name the folder it was trained in
            named = re.sub(
                r'(from_pretrained\("|`slt verify )[^"`]*', rf"\g<1>{repo_id}", card.read_text("utf-8")
            )
            card.write_text(named, "utf-8")
        else:
            write_card(stage, name=repo_id)
        if tags:
            tagged = ModelCard.load(card)
            tagged.data.tags = list(dict.fromkeys([*(tagged.data.tags or []), *tags]))
            tagged.save(card)
        names = {*TICKET_FILES, *_code_files(Path(stage))}
        files = [path for path in sorted(Path(stage).iterdir()) if path.name in names]
        # of an earlier push: would be loaded in place of the masks
        stale = {name for name in api.list_repo_files(repo_id, revision=revision) if _WEIGHTS.fullmatch(name)}
        # One commit, so that nobody ever sees half a ticket; upload_folder may make several.
        commit = api.create_commit(
            repo_id,
            [CommitOperationAdd(path.name, path) for path in files]
            + [CommitOperationDelete(name) for name in sorted(stale - names)],
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Ticket {header.mask_digest[:8]}",
            commit_description=commit_description,
        )
    return str(commit.pr_url or commit.commit_url)


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


def copy_companions(source: str | os.PathLike | None, folder: str | os.PathLike, header: Header) -> None:
    """Bring tokenizer, card and figures from the folder that a ticket was loaded from.

    The tokenizer always; card and figures only if they are of this very mask.
    """
    origin = Path(source) if source else None
    if origin is None or not mask_path(origin).is_file():
        return
    same = read_header(mask_path(origin)).mask_digest == header.mask_digest
    for name in [*TOKENIZER_FILES, *([CARD_FILE, *FIGURES] if same else [])]:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, Path(folder) / name)


# -- the card -------------------------------------------------------------------------------------------


def default_template() -> Path:
    """The template of the project, in a checkout or as installed."""
    checkout = Path(__file__).parent.parent / "model_cards" / "template.md"
    return checkout if checkout.is_file() else Path(__file__).parent / "model_cards" / "template.md"


def write_card(
    folder: str | os.PathLike,
    template: str | os.PathLike | None = None,
    *,
    name: str | None = None,
    records: Iterable[Mapping[str, Any]] = (),
    training: Mapping[str, Any] | None = None,
    measures: Mapping[str, float] | None = None,
    controls: Mapping[str, Mapping[str, float]] | None = None,
    text_sha256: str | None = None,
    command: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
) -> Path:
    """Write README.md into a ticket's folder, whole or not at all; a damaged ticket raises TicketError.

    template: a Jinja template; by default the project's own.
    name: what `from_pretrained` is to be given, such as me/ticket; by default the folder's own name.
    records: the lines of log.jsonl, for the number of steps, the speed, and the last evaluation.
    training: the arguments of the run, by name.
    measures: loss, perplexity and bits per byte, if others than those of the last evaluation.
    controls: the same of other runs on the same data; `random_mask` and `dense` give the gap closed.
    text_sha256: digest of the text trained and validated on.
    command: the words of the command line.
    environment: where it was trained; see `describe_environment`.
    """
    folder, records = Path(folder), list(records)
    header = verify_ticket(folder, weights=False)
    config = json.loads((folder / CONFIG_FILE).read_text())
    name = name or folder.resolve().name
    title = name.rsplit("/", 1)[-1]
    auto_class, task = _AUTO_CLASSES[config["architectures"][0]]
    if measures is None:
        measures = next((item for item in reversed(records) if item["kind"] == "evaluation"), {})
    text = describe_text(training) if training is not None else {}
    if language is None and text.get("name") == EMBEDDED:
        language = "en"
    results = _eval_results(task, text, measures, text_sha256)
    data = ModelCardData(
        model_name=title if results else None,  # part of the model-index only
        library_name="transformers",
        pipeline_tag=task,
        license=license,
        language=language,
        tags=list(TAGS),
        datasets=text.get("dataset"),
        eval_results=results or None,
    )
    runs = {"ticket": measures, **(controls or {})} if _known(measures) else {}
    card = ModelCard.from_template(
        data,
        template_path=str(template or default_template()),
        title=title,
        name=name,
        auto_class=auto_class,
        generates=task == "text-generation",
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        header=header,
        size=measure_size(folder, header),
        laws=sorted({f"`{entry.law}`" for entry in header.tensors.values() if entry.law}),
        shape=[(label, config[key]) for key, label in _SHAPE.items() if config.get(key) is not None],
        tensors=[_tensor_row(tensor, entry, header) for tensor, entry in header.tensors.items()],
        trained=[f"`{tensor}`" for tensor, entry in header.tensors.items() if entry.trained],
        metrics=(columns := [key for key in METRICS if any(key in _known(run) for run in runs.values())]),
        metric_labels=METRICS,
        runs=[
            (LABELS.get(label, label), [_known(run).get(key) for key in columns])
            for label, run in runs.items()
        ],
        gap_closed=gap_closed(runs),
        text={**text, "sha256": text_sha256},
        figures=[
            {"file": file, "caption": caption}
            for file, caption in FIGURES.items()
            if (folder / file).is_file()
        ],
        steps=max((item["step"] for item in records if item["kind"] == "train"), default=0),
        speed=_median(item.get("tokens_per_second") for item in records if item["kind"] == "train"),
        training=_yaml(training) if training else None,
        command=shlex.join(_public(word) for word in command),
        environment=list((environment or {}).items()),
    )
    with replacing(folder / CARD_FILE) as temporary:
        temporary.write_text(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n", encoding="utf-8")
    return folder / CARD_FILE


def describe_environment() -> dict[str, str]:
    """Versions and hardware of this process, without the name of the machine; does not import torch."""
    from . import __version__

    found = {"hf_slt": __version__, "Python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["on"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        found["on"] = f"{cores} CPU cores ({platform.machine()})"
    return found


def describe_text(training: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was trained and validated on: a name of both, and data set and configuration on the Hub."""
    files, dataset = training.get("train_files"), training.get("dataset")
    if files:
        name = _file_names(files)
        held_out = training.get("validation_files")
        return {"name": name, "validation": _file_names(held_out) if held_out else f"held-out part of {name}"}
    if not dataset:
        return {"name": EMBEDDED, "validation": f"held-out part of the {EMBEDDED}"}
    config = training.get("dataset_config")
    on_hub = not Path(dataset).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset)
    name = f"{dataset if on_hub else Path(dataset).name} {config or ''}".strip()
    found = {"name": name, "validation": f"validation text of {name}"}
    return {**found, "dataset": dataset, "config": config} if on_hub else found


def _file_names(files: Iterable[str]) -> str:
    return ", ".join(Path(file).name for file in files)


def measure_size(folder: Path, header: Header) -> dict[str, Any]:
    """Numbers of weights and bytes of a ticket.

    bits_per_weight = 8 * bytes of the file / all weights of the model, drawn or stored
    """
    path = mask_path(folder)
    with open(path, "rb") as file:
        description = 8 + int.from_bytes(file.read(8), "little")  # as safetensors begins
    total = path.stat().st_size
    entries = header.tensors.values()
    trained = sum(entry.value_bytes for entry in entries)
    weights, masked, kept = (
        sum(entry.size for entry in entries),
        sum(entry.size for entry in entries if entry.masked),
        sum(entry.kept or 0 for entry in entries),
    )
    return {
        "file_name": path.name,
        "file": total,
        "description_bytes": description,
        "trained_bytes": trained,
        "entropy_bytes": math.ceil(sum(entry.entropy_bits for entry in entries) / 8),
        "mask_bytes": total - description - trained,
        "weights": weights,
        "masked": masked,
        "kept": kept,
        "density": kept / masked if masked else 1.0,
        "bits_per_weight": 8 * total / weights,
        "times_smaller": 4 * weights / total,
    }


def gap_closed(runs: Mapping[str, Mapping[str, float]]) -> float | None:
    """(random mask - ticket) / (random mask - dense twin), of losses; None where one is missing.

    >>> gap_closed({"ticket": {"loss": 5.0}, "random_mask": {"loss": 8.0}, "dense": {"loss": 4.0}})
    0.75
    """
    losses = [runs.get(label, {}).get("loss", math.nan) for label in ("random_mask", "ticket", "dense")]
    untrained, ticket, dense = losses
    if not all(map(math.isfinite, losses)) or untrained == dense:
        return None
    return (untrained - ticket) / (untrained - dense)


def _known(measures: Mapping[str, Any]) -> dict[str, float]:
    return {key: measures[key] for key in METRICS if math.isfinite(measures.get(key, math.nan))}


def _eval_results(
    task: str, text: Mapping[str, Any], measures: Mapping[str, Any], sha256: str | None
) -> list[EvalResult]:
    if not text:
        return []
    return [
        EvalResult(
            task_type=task,
            dataset_type=text.get("dataset", "text"),
            dataset_name=text["validation"],
            dataset_config=text.get("config"),
            dataset_args={"sha256": sha256} if sha256 else None,
            metric_type=key,
            metric_name=METRICS[key],
            metric_value=value,
        )
        for key, value in _known(measures).items()
    ]


def _tensor_row(name: str, entry: Entry, header: Header) -> dict[str, Any]:
    row = {"name": name, "shape": " x ".join(map(str, entry.shape)), "law": "trained", "scale": ""}
    row |= {"asked": "", "kept": f"{entry.size:,} of {entry.size:,}", "density": "1"}
    if entry.law is not None:
        row |= {"law": entry.law, "scale": f"{entry.scale:.6g}"}
    if entry.kept is not None:
        kept = f"{entry.kept:,} of {entry.size:,}"
        row |= {"asked": str(header.density), "kept": kept, "density": f"{entry.kept / entry.size:.6g}"}
    return row


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(found) if found else None


def _yaml(training: Mapping[str, Any]) -> str:
    """Arguments as lines of a preset; JSON values are YAML too."""
    return "\n".join(
        f"{key}: {json.dumps(_public(value))}"
        for key, value in training.items()
        if value is not None and key not in _PRIVATE
    )


def _public(value: Any) -> Any:
    """A path of this machine, also as --option=path, cut to its last part; anything else as it is.

    >>> _public(["--cache_dir=/home/me/cache", "~/text.txt", "recipes/nano.yaml", 3])
    ['--cache_dir=cache', 'text.txt', 'recipes/nano.yaml', 3]
    """
    if isinstance(value, (list, tuple)):
        return [_public(item) for item in value]
    if not isinstance(value, str):
        return value
    option, equals, rest = value.rpartition("=")
    return (
        option
        + equals
        + (Path(rest).name if rest.startswith(("/", "~")) or Path(rest).is_absolute() else rest)
    )
