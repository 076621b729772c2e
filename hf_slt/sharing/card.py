"""The card of a ticket, written from facts only.

    facts(ticket's own header, config.json, arguments and log of the run) -> template -> README.md

What is not known is left out: a card has no blanks and no guesses. Folders of the machine that trained are
not for the public: of a path only the last part is shown.
"""

import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..model.configuration_supermask_gpt2 import RULE_OPTIONS
from ..model.quantisation import BITS
from ..model.ticket import ADDED, CONFIG_FILE, Entry, Header
from .files import replacing
from .verify import mask_path, verify_ticket

CARD_FILE = "README.md"
PAGE_FILE = "index.html"  # the name that a static Space shows
TAGS = ["supermask", "strong-lottery-ticket", "gpt2"]  # and the rule
# A figure of one of these names, if it lies in the ticket's folder, is shown.
FIGURES = {
    "comparison.png": "Validation loss of the ticket and of its controls",
    "curves.png": "Loss, learning rate, and share of mask bits that flip between two looks",
    "masks.png": "Where the masks keep weights, and how evenly rows and columns share them",
}
EMBEDDED = "embedded corpus (prose of the Python installation)"
LABELS = {"random_mask": "random mask", "dense": "dense twin", "frozen_embeddings": "frozen embeddings"}
METRICS = {"loss": "loss (nats per token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
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
    "embedding_rank": "their rank",
    "layer_norm": "LayerNorm",
}
# Where a run writes and what it shows: no part of what it computes.
_PRIVATE = frozenset("output_dir cache_dir resume_from_checkpoint overwrite report_to".split())
# The lines of our template that say where the ticket is; the last of them tells what the others name.
_PLACES = (
    r'^(model = \w+\.from_pretrained\("){}("\))$',
    r'^(tokenizer = AutoTokenizer\.from_pretrained\("){}("\))$',
    r"^(Every weight and every mask is checked .* on loading; `slt verify ){}(` does so by hand\.)$",
)


def model_cards() -> Path:
    """The folder of the template, and of the ticket that comes along: in a checkout, or as installed."""
    checkout = Path(__file__).parents[2] / "model_cards"
    return checkout if (checkout / "template.md").is_file() else Path(__file__).parents[1] / "model_cards"


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
    origin: str | None = None,
    environment: Mapping[str, str] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    header: Header | None = None,
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
    origin: how the mask came to be, if not by training.
    environment: where it was trained; see `describe_environment`.
    header: of a ticket that was verified before.
    """
    folder, records = Path(folder), list(records)
    header = header or verify_ticket(folder, weights=False)
    config = json.loads((folder / CONFIG_FILE).read_text())
    name = name or folder.resolve().name
    title = name.rsplit("/", 1)[-1]
    auto_class, task = _AUTO_CLASSES[config["architectures"][0]]
    if measures is None:
        measures = next((item for item in reversed(records) if item["kind"] == "evaluation"), {})
    text = describe_text(training) if training is not None else {}
    if language is None and text.get("name") == EMBEDDED:
        language = "en"
    results = [
        EvalResult(
            task_type=task,
            dataset_type=text.get("dataset", "text"),
            dataset_name=text["validation"],
            dataset_config=text.get("config"),
            dataset_args={"sha256": text_sha256} if text_sha256 else None,
            metric_type=key,
            metric_name=METRICS[key],
            metric_value=value,
        )
        for key, value in (_known(measures) if text else {}).items()
    ]
    speeds: list[Any] = [item.get("tokens_per_second") for item in records if item["kind"] == "train"]
    speeds = [speed for speed in speeds if speed is not None and math.isfinite(speed)]
    data = ModelCardData(
        model_name=title if results else None,  # part of the model-index only
        library_name="transformers",
        pipeline_tag=task,
        license=license,
        language=language,
        tags=[*TAGS, str(header.config["rule"]).replace("_", "-")],
        datasets=text.get("dataset"),
        eval_results=results or None,
    )
    runs = {"ticket": measures, **(controls or {})} if _known(measures) else {}
    card = ModelCard.from_template(
        data,
        template_path=str(template or model_cards() / "template.md"),
        title=title,
        name=name,
        auto_class=auto_class,
        generates=task == "text-generation",
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        header=header,
        size=measure_size(folder, header),
        factors=list(factors_told(header)),
        options=[
            ("density asked" if key == "density" else key, header.config[key])
            for key in RULE_OPTIONS
            if header.config.get(key) is not None
        ],
        laws=sorted({f"`{entry.law}`" for entry in header.tensors.values() if entry.law}),
        shape=[(label, config[key]) for key, label in _SHAPE.items() if config.get(key) is not None],
        tensors=[_tensor_row(tensor, entry, header) for tensor, entry in header.tensors.items()],
        trained=_trained(header),
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
        speed=statistics.median(speeds) if speeds else None,
        training="\n".join(  # as lines of a preset; JSON values are YAML too
            f"{key}: {json.dumps(_public(value, key))}"
            for key, value in (training or {}).items()
            if value is not None and key not in _PRIVATE
        ),
        command=shlex.join(_public_words(command)),
        origin=origin,
        environment=list((environment or {}).items()),
    )
    with replacing(folder / CARD_FILE) as temporary:
        temporary.write_text(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n", encoding="utf-8")
    return folder / CARD_FILE


def rename_card(text: str, name: str) -> str:
    """A card that says `name` where our template said where the ticket is; all else is the author's own."""
    if found := re.search(_PLACES[-1].format("(?P<name>[^`]*)"), text, re.MULTILINE):
        for place in _PLACES:
            ours = re.compile(place.format(re.escape(found["name"])), re.MULTILINE)
            text = ours.sub(rf"\g<1>{name}\g<2>", text)
    return text


def link_page(text: str) -> str:
    """A card that links the page beside it: after what our template says of loading, or at its end.

    >>> link_page("# Mine").splitlines()[2]
    '[index.html](index.html) is this ticket as one page: download it, open it, and it writes.'
    """
    if f"]({PAGE_FILE})" in text:
        return text
    link = f"[{PAGE_FILE}]({PAGE_FILE}) is this ticket as one page: download it, open it, and it writes."
    found = re.search(_PLACES[-1].format("[^`]*"), text, re.MULTILINE)
    end = found.end() if found else len(text.rstrip())
    return f"{text[:end]}\n\n{link}\n{text[end:].removeprefix(chr(10))}"


def describe_environment() -> dict[str, str]:
    """Versions and hardware of this process, without the name of the machine; does not import torch."""
    found = {"Python": platform.python_version()}
    for package in ("hf_slt", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy"):
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
    files = (training.get("train_files"), training.get("validation_files"))
    if files[0]:
        name, held_out = (", ".join(Path(file).name for file in some or ()) for some in files)
        return {"name": name, "validation": held_out or f"held-out part of {name}"}
    if not (dataset := training.get("dataset")):
        return {"name": EMBEDDED, "validation": f"held-out part of the {EMBEDDED}"}
    config = training.get("dataset_config")
    name = f"{_public(dataset, 'dataset')} {config or ''}".strip()
    found = {"name": name, "validation": f"validation text of {name}"}
    return {**found, "dataset": dataset, "config": config} if _on_hub(dataset) else found


def measure_size(folder: Path, header: Header) -> dict[str, Any]:
    """Numbers of weights and bytes of a ticket.

    bits_per_weight = 8 * bytes of the file / all weights of the model, drawn or stored
    """
    path = mask_path(folder)
    with open(path, "rb") as file:
        description = 8 + int.from_bytes(file.read(8), "little")  # as safetensors begins
    total = path.stat().st_size
    entries = header.tensors.values()
    trained, weights = sum(map(value_bytes, entries)), sum(entry.size for entry in entries)
    masked = sum(sum(entry.counts or ()) for entry in entries)
    kept = sum(kept_of(header, entry) for entry in entries if entry.kind == "masked")
    return {
        "file_name": path.name,
        "file": total,
        "description_bytes": description,
        "trained_bytes": trained,
        "entropy_bytes": math.ceil(sum(map(entropy_bits, entries)) / 8),
        "mask_bytes": total - description - trained,
        "weights": weights,
        "masked": masked,
        "kept": kept,
        "density": kept / masked if masked else 1.0,
        "bits_per_weight": 8 * total / weights,
        "times_smaller": 4 * weights / total,
    }


def factors_told(header: Header) -> Sequence[float]:
    """What the codes of a ticket stand for."""
    return (ADDED | dict(header.config))["factors"]


def kept_of(header: Header, entry: Entry) -> int:
    """How many weights of a tensor are not zero; those outside of the search are not counted."""
    if entry.counts is None:
        return entry.size
    return sum(count for count, factor in zip(entry.counts, factors_told(header), strict=True) if factor)


def entropy_bits(entry: Entry) -> float:
    """The least a mask takes of which only the counts of codes are known: log2 of the multinomial.

    >>> round(entropy_bits(Entry((10, 10), "mask", "normal", 1.0, counts=(98, 2))), 3)
    12.273
    """
    if entry.counts is None:
        return 0.0
    return (math.lgamma(sum(entry.counts) + 1) - sum(math.lgamma(n + 1) for n in entry.counts)) / math.log(2)


def _trained(header: Header) -> list[str]:
    """What was trained beside the masks: tables by name, vectors in one word."""
    entries = {name: entry for name, entry in header.tensors.items() if entry.kind == "trained"}
    found = [f"`{name}`" for name, entry in entries.items() if entry.shape[0] > 1]
    if numbers := sum(entry.size for entry in entries.values() if entry.shape[0] == 1):
        found.append(f"{numbers:,} scales, gains and biases")
    return found


def value_bytes(entry: Entry) -> int:
    """Bytes of trained values, with the scales of their rows."""
    if entry.kind != "trained":
        return 0
    return -(-entry.size * entry.bits // 8) + (2 * entry.shape[0] if entry.bits in BITS else 0)


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


def _tensor_row(name: str, entry: Entry, header: Header) -> dict[str, Any]:
    row = {"name": name, "shape": " x ".join(map(str, entry.shape)), "law": "trained", "scale": ""}
    row |= {"asked": "", "kept": f"{entry.size:,} of {entry.size:,}", "density": "1"}
    if entry.law is not None:
        row |= {"law": entry.law, "scale": f"{entry.scale:.6g}"}
    if entry.counts is not None:
        kept, searched = kept_of(header, entry), sum(entry.counts)
        asked = header.config.get("density")
        row |= {"asked": "" if asked is None else str(asked), "kept": f"{kept:,} of {searched:,}"}
        row |= {"density": f"{kept / searched:.6g}"}
    return row


def _on_hub(name: str) -> bool:
    return not Path(name).exists() and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _public(value: Any, option: str) -> Any:
    """The value of an option, of a path only the last part.

    >>> _public(["../secret/text.txt", "~/b.txt", 3], "train_files"), _public("openai/gpt2", "tokenizer")
    (['text.txt', 'b.txt', 3], 'openai/gpt2')
    """
    if isinstance(value, (list, tuple)):
        return [_public(item, option) for item in value]
    if not isinstance(value, str) or option == "prompt":
        return value
    if option in ("dataset", "tokenizer") and _on_hub(value):
        return value
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def _public_words(command: Iterable[str]) -> Iterator[str]:
    """A command line for all to see.

    >>> list(_public_words(["../mine/train.py", "--cache_dir=../cache", "--tokenizer", "a/b"]))
    ['train.py', '--cache_dir=cache', '--tokenizer', 'a/b']
    """
    option = ""
    for word in command:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            option = name[2:].replace("-", "_")
            yield name + equals + _public(value, option)
        else:
            yield _public(word, option)
