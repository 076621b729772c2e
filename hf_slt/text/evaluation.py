"""How well a causal language model predicts text: loss, perplexity, bits per byte.

Every token is predicted exactly once and has the same weight, however the text was cut:

    loss          = sum of -ln p(token | tokens before it) / tokens        nats per token
    perplexity    = exp(loss)
    bits per byte = sum of -log2 p / UTF-8 bytes of the text               does not depend on the tokenizer

`evaluate_blocks` takes packed blocks, as training does; `evaluate_text` takes text and slides a window
over each document; `evaluate_saved` does the same for a model and files on a disk or the Hub (`slt evaluate`).
Any causal LM of Transformers can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

try:
    from ..errors import SLTError
    from ..masks.cache import fixed_masks
    from ..progress import progress_bar
except ImportError:  # this file was copied into the cache of `evaluate`, with causal_lm_metric.py only
    SLTError = ValueError  # type: ignore[misc, assignment]
    fixed_masks = nullcontext  # type: ignore[misc, assignment]
    from tqdm.auto import tqdm as progress_bar  # type: ignore[no-redef]

LONGEST_WINDOW = 1024  # default if a model could take more: windows of 100k tokens need too much memory


class EvaluationError(SLTError):
    """Model, tokenizer and text do not fit together. The message names the value and says what to do."""


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate a model within this block: without gradients and in eval mode.

    Every module gets back the mode it had, also after an error. A model that learns computes its weights only once.

    Args:
        model (`torch.nn.Module`):
            Any model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), fixed_masks():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _device(model: torch.nn.Module) -> torch.device:
    # A ticket without LayerNorm has only buffers.
    return next(chain(model.parameters(), model.buffers())).device


def _sum_nats(model: torch.nn.Module, ids: Tensor, labels: Tensor, **options: Any) -> tuple[float, int]:
    """Return the sum of -ln p(label) over labels other than -100, and their number. Shapes: (batch, length)."""
    config = getattr(getattr(model, "module", model), "config", None)
    if hasattr(config, "use_cache"):
        options["use_cache"] = False  # no KV cache is needed here
    logits = model(input_ids=ids, **options).logits
    nats = 0.0
    for row, targets in zip(logits, labels, strict=True):  # by row: a copy of all logits would be large
        losses = F.cross_entropy(row.float(), targets, ignore_index=-100, reduction="none")
        nats += losses.cpu().double().sum().item()  # in float64, which not all devices have
    return nats, int((labels != -100).sum())


def _measures(nats: float, tokens: int) -> dict[str, float]:
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan
    return {"loss": loss, "perplexity": perplexity, "tokens": tokens}


def evaluate_blocks(
    model: torch.nn.Module,
    batches: Iterable[Any],
    bytes_per_token: float | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Measure a model on packed blocks. In each block all tokens except the first are predicted.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
        batches (`Iterable[Any]`):
            Each is ids (batch, length), or a mapping with `input_ids` and perhaps `labels`. Labels of -100 are left
            out. Batches may have any sizes.
        bytes_per_token (`float`, *optional*):
            UTF-8 bytes per token of the text, for bits per byte.
        reduce (`Callable[[Tensor], Tensor]`, *optional*):
            Sums a tensor over processes (`accelerator.reduce`): each then returns the measures of all batches.
        progress (`bool`, defaults to `False`):
            Whether to show a bar.

    Returns:
        `dict[str, float]`: `loss`, `perplexity` and `tokens`; `bits_per_byte` if `bytes_per_token` is given.

    Raises:
        [`EvaluationError`]: if there is no token to predict.
    """
    device = _device(model)
    nats, tokens = 0.0, 0
    with evaluating(model):
        for batch in progress_bar(batches, "evaluating", disable=not progress, leave=False, unit="batch"):
            mapping = batch if hasattr(batch, "keys") else {"input_ids": batch}
            ids = torch.as_tensor(mapping["input_ids"], device=device).long()
            labels = torch.as_tensor(mapping.get("labels", ids), device=device).long()
            # The last logit predicts beyond the block; a label of -100 keeps the shapes equal.
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
            batch_nats, count = _sum_nats(model, ids, labels)
            nats, tokens = nats + batch_nats, tokens + count
    if reduce is not None:
        exact = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        nats, tokens = reduce(torch.tensor([nats, tokens], dtype=exact, device=device)).tolist()
    if not tokens:
        raise EvaluationError("no token to predict in the batches; give at least one block of 2 tokens")
    measures = _measures(nats, int(tokens))
    if bytes_per_token is not None:
        # Blocks cover the text without gaps, so the first token of each counts too: it is given the mean loss.
        measures["bits_per_byte"] = measures["loss"] / math.log(2) / bytes_per_token
    return measures


def _windows(length: int, block_size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, fresh, end): the new targets are fresh..end-1, predicted from the inputs start..end-2.

    Each target of 1..length-1 is in exactly one window. The last window starts earlier, to have full context.
    """
    fresh = 1
    while fresh < length:
        end = min(length, fresh + (block_size if fresh == 1 else stride))
        yield max(0, end - 1 - block_size), fresh, end
        fresh = end


def evaluate_text(
    model: torch.nn.Module,
    tokenizer: Any,
    texts: str | Iterable[str],
    block_size: int | None = None,
    stride: int | None = None,
    batch_size: int = 4,
    progress: bool = False,
) -> dict[str, float]:
    """Measure a model on texts. Each text is a separate document.

    A start token (if there is none, end-of-text) is put before a document, so its first token is predicted too. A
    token sees at least block_size - stride tokens before it, or all if there are fewer. Bits per byte assume a
    tokenizer that loses nothing, such as byte-level BPE.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
        tokenizer:
            Its tokenizer.
        texts (`str` or `Iterable[str]`):
            One text, or several. Empty ones are left out.
        block_size (`int`, *optional*):
            Inputs in a window. Default: the positions of the model, at most 1024.
        stride (`int`, *optional*):
            Tokens from the start of a window to the start of the next. Default: half of a window.
        batch_size (`int`, defaults to 4):
            Windows in a batch.
        progress (`bool`, defaults to `False`):
            Whether to show a bar.

    Returns:
        `dict[str, float]`: `loss`, `perplexity`, `bits_per_byte`, `tokens` and `bytes`.

    Raises:
        [`EvaluationError`]: if there is no text, if a window is impossible, or if the tokenizer is not the model's.
    """
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    block_size = min(LONGEST_WINDOW, longest or LONGEST_WINDOW) if block_size is None else block_size
    stride = max(1, block_size // 2) if stride is None else stride
    if not 1 <= block_size <= (longest or block_size):
        limit = f"1..{longest}, the positions of the model" if longest else "the positive numbers"
        raise EvaluationError(f"block_size {block_size} is not in {limit}")
    if not 1 <= stride <= block_size:
        raise EvaluationError(
            f"stride {stride} is not in 1..{block_size} (block_size); tokens would be left out"
        )
    if batch_size < 1:
        raise EvaluationError(f"batch_size {batch_size} is not positive; use 1 or more")
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise EvaluationError(
            "the tokenizer has neither start nor end-of-text token; set tokenizer.eos_token"
        )

    texts = [text for text in ([texts] if isinstance(texts, str) else texts) if text]
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    documents = [[first, *ids] for ids in tokenizer(texts, **options)["input_ids"]] if texts else []
    largest = max((max(ids) for ids in documents), default=0)
    check_vocabulary(largest, getattr(config, "vocab_size", math.inf))
    windows = [
        (ids[start : end - 1], [-100] * (fresh - 1 - start) + ids[fresh:end])
        for ids in documents
        for start, fresh, end in _windows(len(ids), block_size, stride)
    ]
    if not windows:
        raise EvaluationError("the texts hold no token to predict; give text that is not empty")
    windows.sort(key=lambda window: -len(window[0]))  # similar lengths together need little padding

    device = _device(model)
    nats, tokens = 0.0, 0
    with (
        evaluating(model),
        progress_bar(total=len(windows), desc="evaluating", disable=not progress, unit="window") as bar,
    ):
        for start in range(0, len(windows), batch_size):
            rows = zip(*windows[start : start + batch_size], strict=True)
            inputs, targets = ([torch.tensor(row, device=device) for row in half] for half in rows)
            # Padding is on the right, which a causal model does not see; the mask is for models that require one.
            ids = pad_sequence(inputs, batch_first=True, padding_value=first)
            labels = pad_sequence(targets, batch_first=True, padding_value=-100)
            seen = pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True)
            batch_nats, count = _sum_nats(model, ids, labels, attention_mask=seen)
            nats, tokens = nats + batch_nats, tokens + count
            bar.update(len(inputs))
    size = sum(len(text.encode()) for text in texts)
    return {**_measures(nats, tokens), "bits_per_byte": nats / math.log(2) / size, "bytes": size}


def check_vocabulary(largest: int, vocabulary: float) -> None:
    """Raise `EvaluationError` for a token id that the model has no row for.

    Args:
        largest (`int`):
            The largest token id.
        vocabulary (`float`):
            Number of tokens that the model knows.

    Raises:
        [`EvaluationError`]: if the model has no row for that id.
    """
    if largest >= vocabulary:
        raise EvaluationError(
            f"token id {largest} is outside the model's vocabulary of {vocabulary}; use the model's tokenizer"
        )


def load_model(name: str, tokenizer: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Load model and tokenizer of any causal language model: a ticket, a local folder, or a name on the Hub.

    Args:
        name (`str`):
            Folder or Hub name.
        tokenizer (`str`, *optional*):
            Folder or Hub name of the tokenizer. Default: that of the model.
        options:
            Keywords of `from_pretrained`.

    Returns:
        `tuple[Any, Any]`: model and tokenizer.

    Raises:
        [`EvaluationError`]: if there is no causal language model with a tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with suppress(ModuleNotFoundError):
        import hf_slt  # noqa: F401  registers the classes of tickets, where the package is installed
    try:
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, **options)
        return model, AutoTokenizer.from_pretrained(tokenizer or name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise EvaluationError(
            f"cannot load {name!r}: {cause}; give a folder or Hub name with a causal LM and its tokenizer"
        ) from error


def evaluate_saved(
    name: str,
    files: Iterable[str] | None = None,
    *,
    text_column: str = "text",
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    **options: Any,
) -> dict[str, float]:
    """Measure a saved model as `evaluate_text` does, on files or by default on the embedded corpus.

    Args:
        name (`str`):
            Folder or Hub name.
        files (`Iterable[str]`, *optional*):
            Text files, or files with a column of text. Default: the validation part of the embedded corpus.
        text_column (`str`, defaults to `"text"`):
            Column of the text in files that have columns.
        tokenizer (`str`, *optional*):
            Folder or Hub name of the tokenizer. Default: that of the model.
        device (`str`, defaults to `"cpu"`):
            Device to compute on.
        dtype (`str`, defaults to `"auto"`):
            Type to compute in. Default: that of the model.
        options:
            Those of `evaluate_text`.

    Returns:
        `dict[str, float]`: the measures of `evaluate_text`.

    Raises:
        [`EvaluationError`]: as in `evaluate_text`, and if the loss is not finite.
    """
    from hf_slt.text.corpus import iterate_texts, read_files
    from hf_slt.text.splits import embedded_validation

    texts = list(iterate_texts(read_files(files, text_column) if files else embedded_validation()))
    model, words = load_model(name, tokenizer, dtype=dtype)
    measures = evaluate_text(model.to(device), words, texts, **options)
    if not math.isfinite(measures["loss"]):
        raise EvaluationError(f"loss is {measures['loss']}: the weights are damaged or overflow {dtype}")
    return measures
