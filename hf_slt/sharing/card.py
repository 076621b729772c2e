"""The card of a ticket, written from facts only.

    facts(ticket's own header, config.json, arguments and log of the run) -> template -> README.md

Unknown facts are left out: a card has no blanks and no guesses. The folders of the training machine are private:
only the last part of a path is shown.
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

from ..about import install_command
from ..tickets.entries import Entry
from ..tickets.files import replacing
from ..tickets.format import CONFIG_FILE, Header
from ..tickets.verify import mask_path, verify_files
from ..weights.quantisation import BITS
from ..weights.trellis import reachable_states

CARD_FILE = "README.md"
PAGE_FILE = "index.html"  # the name that a static Space shows
TAGS = ["supermask"]  # and the architecture and the rule
STRICT_TAG = "strong-lottery-ticket"  # only if the mask chooses among drawn weights
# The card shows figures with these names, if they are in the ticket's folder.
FIGURES = {
    "comparison.png": "Validation loss of the ticket and of its controls",
    "curves.png": "Loss, learning rate, and share of mask bits that flip between two evaluations",
    "masks.png": "Where weights are kept (or positive, if all are kept), and how evenly rows and columns share them",
}
EMBEDDED = "embedded corpus (prose of the Python installation)"
LABELS = {"random_mask": "random mask", "dense": "dense twin", "frozen_embeddings": "frozen embeddings"}
METRICS = {"loss": "loss (nats per token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
_TASKS = {  # class to load a ticket with, and its task on the Hub
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModel": "feature-extraction",
}
_SHAPE = {
    "n_layer": "blocks",
    "num_hidden_layers": "blocks",
    "n_embd": "width",
    "hidden_size": "width",
    "n_head": "heads",
    "num_attention_heads": "heads",
    "n_positions": "positions",
    "max_position_embeddings": "positions",
    "vocab_size": "vocabulary",
    "embedding": "embeddings",
    "embedding_rank": "their rank",
    "layer_norm": "LayerNorm",
}
# Options that say where a run writes and what it shows. They do not change what it computes.
_PRIVATE = frozenset("output_dir cache_dir resume_from_checkpoint overwrite report_to".split())
# The lines of our template that name the ticket. The name in the last of them is the one that all are compared with.
_PLACES = (
    r'^(model = \w+\.from_pretrained\("){}("\))$',
    r'^(tokenizer = AutoTokenizer\.from_pretrained\("){}("\))$',
    r"^(Every weight and every mask is checked .* on loading; `slt verify ){}(` does so by hand\.)$",
)


def model_cards() -> Path:
    """Return the folder of the template and of the included ticket: in a checkout, or as installed.

    Returns:
        `Path`: the folder.
    """
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
    """Write the card of a ticket, README.md, into its folder.

    Args:
        folder (`str` or `os.PathLike`):
            The ticket's folder.
        template (`str` or `os.PathLike`, *optional*):
            A Jinja template. Default: the project's own.
        name (`str`, *optional*):
            The name to give to `from_pretrained`, such as me/ticket. Default: the name of the folder.
        records (`Iterable[Mapping[str, Any]]`, *optional*):
            The lines of log.jsonl, for the number of steps, the speed and the last evaluation.
        training (`Mapping[str, Any]`, *optional*):
            The arguments of the run, by name.
        measures (`Mapping[str, float]`, *optional*):
            Loss, perplexity and bits per byte. Default: those of the last evaluation.
        controls (`Mapping[str, Mapping[str, float]]`, *optional*):
            The measures of other runs on the same data. `random_mask` and `dense` give the gap closed.
        text_sha256 (`str`, *optional*):
            Digest of the text of training and validation.
        command (`Sequence[str]`, *optional*):
            The words of the command line.
        origin (`str`, *optional*):
            How the mask was made, if not by training.
        environment (`Mapping[str, str]`, *optional*):
            Where it was trained; see `describe_environment`.
        license (`str`, *optional*):
            License of the ticket, for the metadata of the card.
        language (`str` or `list[str]`, *optional*):
            Language or languages of the text, for the metadata of the card.
        header ([`Header`], *optional*):
            Header of the ticket, if it was verified before.

    Returns:
        `Path`: the card.

    Raises:
        [`TicketError`]: if the ticket is damaged.
    """
    folder, records = Path(folder), list(records)
    header = header or verify_files(folder, weights=False).header
    config = json.loads((folder / CONFIG_FILE).read_text())
    facts = {**config, **header.options}
    name = name or folder.resolve().name
    title = name.rsplit("/", 1)[-1]
    auto_class = _auto_class(config)
    task = _TASKS[auto_class]
    family = str(config["model_type"]).removeprefix("supermask_")
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
    kind = kind_of_ticket(header)
    tags = [*TAGS, family, *([STRICT_TAG] if header.is_strict else [])]
    speeds: list[Any] = [item.get("tokens_per_second") for item in records if item["kind"] == "train"]
    speeds = [speed for speed in speeds if speed is not None and math.isfinite(speed)]
    data = ModelCardData(
        model_name=title if results else None,  # part of the model-index only
        library_name="transformers",
        pipeline_tag=task,
        license=license,
        language=language,
        tags=[*tags, str(header.options["rule"]).replace("_", "-")],
        datasets=text.get("dataset"),
        eval_results=results or None,
    )
    runs = {"ticket": measures, **(controls or {})} if _known(measures) else {}
    card = ModelCard.from_template(
        data,
        template_path=str(template or model_cards() / "template.md"),
        title=title,
        name=name,
        install=install_command(),
        auto_class=auto_class,
        generates=task == "text-generation",
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        header=header,
        size=measure_size(folder, header),
        kind=kind,
        states=_number_of_states(header),
        family="GPT-2" if family == "gpt2" else f"{family} model",
        factors=list(header.options["factors"]),
        options=[
            ("density asked" if key == "density" else key, _plain(value))
            for key, value in header.options["rule_options"].items()
        ],
        laws=sorted({f"`{entry.law}`" for entry in header.tensors.values() if entry.law}),
        shape=[(label, _plain(facts[key])) for key, label in _SHAPE.items() if facts.get(key) is not None],
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


def _auto_class(config: Mapping[str, Any]) -> str:
    """Return the Auto class that loads a ticket as the class that was saved."""
    names = {auto: str(one).rsplit(".", 1)[-1] for auto, one in config["auto_map"].items()}
    saved = next(iter(config.get("architectures") or []), "")
    return next((auto for auto in _TASKS if names.get(auto) == saved), "AutoModel")


def _plain(value: Any) -> str:
    """Return a value of an untrusted configuration as text without markup.

    >>> _plain(12), _plain("trained"), _plain("![x](http://x)")
    ('12', 'trained', '--x--http---x-')
    """
    return re.sub(r"[^\w .,+-]", "-", str(value), flags=re.ASCII)[:99]


def rename_card(text: str, name: str) -> str:
    """Return a card with `name` wherever our template names the ticket. All other text is the author's and stays.

    Args:
        text (`str`):
            A card.
        name (`str`):
            The new name of the ticket, such as me/ticket.

    Returns:
        `str`: the card.
    """
    if found := re.search(_PLACES[-1].format("(?P<name>[^`]*)"), text, re.MULTILINE):
        for place in _PLACES:
            ours = re.compile(place.format(re.escape(found["name"])), re.MULTILINE)
            text = ours.sub(rf"\g<1>{name}\g<2>", text)
    return text


def resize_card(folder: str | os.PathLike, header: Header) -> None:
    """Update the sizes in the card of a folder, in the lines of our template, to those of its mask file.

    Args:
        folder (`str` or `os.PathLike`):
            The ticket's folder. Without a card nothing is done.
        header ([`Header`]):
            Header of the ticket.
    """
    path = Path(folder) / CARD_FILE
    if not path.is_file():
        return
    size = measure_size(Path(folder), header)
    before = text = path.read_text("utf-8")
    for place, new in {
        r"(`)[\w.]+(` takes)$": size["file_name"],
        r"^()[\d,]+( bytes for [\d,]+ weights,)$": f"{size['file']:,}",
        r"^(\*\*)[\d.]+( bits per weight\*\* \(float32 takes)$": f"{size['bits_per_weight']:.3f}",
        r"^()[\d.]+( times as much\)\.)": f"{size['times_smaller']:.1f}",
        r"^(Bytes of `)[\w.]+(`:)$": size["file_name"],
        r"^(\| masks \()\w+(\) \| [\d,]+ \| [\d,]+ \|)$": header.encoding,
        r"^(\| masks \(\w+\) \| [\d,]+ \| )[\d,]+( \|)$": f"{size['mask_bytes']:,}",
        r"^(\| description: [^|]* \| \| )[\d,]+( \|)$": f"{size['description_bytes']:,}",
        r"^(\| \*\*file\*\* \| \*\*[\d,]+\*\* \| \*\*)[\d,]+(\*\* \|)$": f"{size['file']:,}",
    }.items():
        text = re.sub(place, rf"\g<1>{new}\g<2>", text, flags=re.MULTILINE)
    if text != before:
        with replacing(path) as temporary:
            temporary.write_text(text, "utf-8")


def link_page(text: str) -> str:
    """Return a card with a link to the page in the same folder. It follows the part about loading, or is the end.

    Args:
        text (`str`):
            A card.

    Returns:
        `str`: the card.

    Example:

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
    """Return versions and hardware of this process, without the name of the machine. It does not import torch.

    Returns:
        `dict[str, str]`: versions by package, and the hardware.
    """
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
    """Return the text of training and validation: names of both, data set and configuration on the Hub.

    Args:
        training (`Mapping[str, Any]`):
            The arguments of the run, by name.

    Returns:
        `dict[str, Any]`: facts for the card, by name.
    """
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
    """Return numbers of weights and bytes of a ticket.

    bits_per_weight = 8 * bytes of the file / all weights of the model, drawn or stored

    Args:
        folder (`Path`):
            Folder of a ticket.
        header ([`Header`]):
            Its header.

    Returns:
        `dict[str, Any]`: counts and sizes by name.
    """
    path = mask_path(folder)
    with open(path, "rb") as file:
        description = 8 + int.from_bytes(file.read(8), "little")  # as safetensors begins
    total = path.stat().st_size
    entries = header.tensors.values()
    trained, weights = sum(map(value_bytes, entries)), sum(entry.size for entry in entries)
    masked = sum(sum(entry.counts or ()) for entry in entries)
    by_kind = dict.fromkeys(("masked", "frozen", "trained"), 0)
    for entry in entries:
        by_kind[entry.kind] += entry.size
    kept = sum(kept_of(header, entry) for entry in entries if entry.kind == "masked")
    return {
        "file_name": path.name,
        "file": total,
        "description_bytes": description,
        "trained_bytes": trained,
        "entropy_bytes": math.ceil(sum(map(entropy_bits, entries)) / 8),
        "mask_bytes": total - description - trained,
        "weights": weights,
        "weights_by_kind": by_kind,
        "masked": masked,
        "kept": kept,
        "density": kept / masked if masked else 1.0,
        "bits_per_weight": 8 * total / weights,
        "times_smaller": 4 * weights / total,
    }


def _number_of_states(header: Header) -> int | None:
    """Return how many drawn numbers a path can choose from, or None if codes are not a path."""
    state_bits = header.options.get("state_bits")
    return None if state_bits is None else len(reachable_states(len(header.options["factors"]), state_bits))


def kind_of_ticket(header: Header) -> str:
    """Say in words what was learned in a ticket's matrices: a choice among drawn weights, or the weights themselves.

    If the mask sets signs and all weights are drawn as +c or -c, each weight can become c times any factor, whatever
    was drawn. The mask is then a quantised matrix, and any other seed would do as well.

    Args:
        header ([`Header`]):
            Header of a ticket.

    Returns:
        `str`: a sentence for the card.
    """
    factors = header.options["factors"]
    if backbone := header.options.get("backbone"):
        return f"masks over the pretrained weights of {_public(backbone, 'dataset')}"
    drawn = [entry for entry in header.tensors.values() if entry.law is not None]
    if states := _number_of_states(header):
        return f"strict ticket (every weight is one of {states} drawn numbers)"
    if header.is_strict:
        return "strict ticket (the mask keeps or drops drawn weights)"
    if min(factors) >= 0:
        return "signs drawn (the mask multiplies drawn weights)"
    if {*factors} != {-factor for factor in factors}:
        return "sign learned"
    everywhere = all(entry.kind == "masked" and sum(entry.counts or ()) == entry.size for entry in drawn)
    if everywhere and {entry.law for entry in drawn} == {"signed_constant"}:
        name = {2: "binary", 3: "ternary"}.get(len(factors), f"{len(factors)} levels")
        return f"{name} (sign learned; the seed carries nothing)"
    return "sign learned (magnitudes are drawn)"


def kept_of(header: Header, entry: Entry) -> int:
    """Return how many of the searched weights of a tensor are not zero.

    Args:
        header ([`Header`]):
            Header of a ticket.
        entry ([`Entry`]):
            One of its tensors.

    Returns:
        `int`: number of weights.
    """
    if entry.counts is None:
        return entry.size
    return sum(count for count, factor in zip(entry.counts, header.options["factors"], strict=True) if factor)


def entropy_bits(entry: Entry) -> float:
    """Return how many bits a mask needs at least, if only the counts of its codes are known: log2 of the multinomial.

    Args:
        entry ([`Entry`]):
            A tensor of a ticket.

    Returns:
        `float`: number of bits.

    Example:

    >>> round(entropy_bits(Entry((10, 10), "mask", "normal", 1.0, counts=(98, 2))), 3)
    12.273
    """
    if entry.counts is None:
        return 0.0
    return (math.lgamma(sum(entry.counts) + 1) - sum(math.lgamma(n + 1) for n in entry.counts)) / math.log(2)


def _trained(header: Header) -> list[str]:
    """Return what was trained besides the masks: the names of tables, and the number of other values."""
    entries = {name: entry for name, entry in header.tensors.items() if entry.kind == "trained"}
    found = [f"`{name}`" for name, entry in entries.items() if entry.shape[0] > 1]
    if numbers := sum(entry.size for entry in entries.values() if entry.shape[0] == 1):
        found.append(f"{numbers:,} scales, gains and biases")
    return found


def value_bytes(entry: Entry) -> int:
    """Return the bytes of trained values, with the scales of their rows.

    Args:
        entry ([`Entry`]):
            A tensor of a ticket.

    Returns:
        `int`: number of bytes; 0 if its values are not trained.
    """
    if entry.kind != "trained":
        return 0
    return -(-entry.size * entry.bits // 8) + (2 * entry.shape[0] if entry.bits in BITS else 0)


def gap_closed(runs: Mapping[str, Mapping[str, float]]) -> float | None:
    """Compute (random mask - ticket) / (random mask - dense twin) from losses.

    Args:
        runs (`Mapping[str, Mapping[str, float]]`):
            Measures of `"ticket"`, `"random_mask"` and `"dense"`, each with a `"loss"`.

    Returns:
        `float | None`: the share of the gap that the ticket closes; None if a loss is missing.

    Example:

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
        asked = header.options["rule_options"].get("density")
        row |= {"asked": "" if asked is None else str(asked), "kept": f"{kept:,} of {searched:,}"}
        row |= {"density": f"{kept / searched:.6g}"}
    return row


def _on_hub(name: str) -> bool:
    return not Path(name).exists() and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _public(value: Any, option: str) -> Any:
    """Return the value of an option. If it is a path, return only the last part.

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
    """Return a command line without the folders of this machine.

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
