"""A ticket as a GGUF file, which llama.cpp runs without Python: a stock model with its tokenizer.

    ticket -> merged stock model -> tensors under llama.cpp's names, each in the smallest type that holds it

Names of tensors and keys are those of the package gguf. `ARCHITECTURES` has the differences between llama.cpp and
transformers: norms to which one of them adds 1, and queries and keys that are rotated in another order. If llama.cpp
would compute something else, an error names the option. gguf_types.py says how weights are stored, gguf_vocabulary.py
how the tokenizer is. Norms, biases and positions are float32 in files of every type.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from ..about import require_packages
from ..errors import SLTError
from ..sharing.hub import TOKENIZER_FILES
from ..tickets.files import replacing
from .gguf_types import TYPES, choose_types, describe_types, pack
from .gguf_vocabulary import Vocabulary, read_vocabulary
from .tokenizer import load_fast_tokenizer

TABLES = ("token_embd.weight", "output.weight")
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # the same function


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes a model of transformers.

    Args:
        name (`str`):
            Its name in llama.cpp.
        activations (`tuple[str, ...]`):
            The activation functions that it may have in llama.cpp.
        neighbours (`bool`, defaults to `False`):
            Whether llama.cpp rotates neighbouring numbers of a query, instead of numbers half a head apart.
        biases (`bool`, defaults to `False`):
            Whether attention and MLP may have biases.
        rope_factors (`bool`, defaults to `False`):
            Whether each frequency may have its own factor, as in Llama 3.1.
        added_gain (`float`, defaults to 0.0):
            What transformers adds to the weight of a norm and llama.cpp does not.
    """

    name: str
    activations: tuple[str, ...] = ("silu", "swish")
    neighbours: bool = False
    biases: bool = False
    rope_factors: bool = False
    added_gain: float = 0.0


# By the stock model type.
ARCHITECTURES = {
    "gpt2": Architecture("gpt2", _GELU, biases=True),
    "llama": Architecture("llama", neighbours=True, biases=True, rope_factors=True),
    "mistral": Architecture("llama", neighbours=True, rope_factors=True),
    "qwen3": Architecture("qwen3"),
    "gemma3_text": Architecture("gemma3", _GELU, added_gain=1.0),
}


def export_gguf(
    folder: str | os.PathLike, path: str | os.PathLike, type: str = "auto", tokenizer: str | None = None
) -> str:
    """Write the ticket of a folder as one GGUF file.

    Args:
        folder (`str` or `os.PathLike`):
            The ticket's folder.
        path (`str` or `os.PathLike`):
            The file to write.
        type (`str`, defaults to `"auto"`):
            How llama.cpp stores the weights, one of `TYPES`. Every matrix that this type can hold gets it, the others
            get the smallest type that can hold them. `"auto"` uses the smallest for all.
        tokenizer (`str`, *optional*):
            Folder or Hub name of the tokenizer. Default: the one in `folder`.

    Returns:
        `str`: lines that say which types were used, and what was rounded.

    Raises:
        [`SLTError`]: if llama.cpp cannot compute this model or split text as its tokenizer does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    require_packages("GGUF files", "gguf", extra="llama")
    folder, path = Path(folder), Path(path)
    if type not in ("auto", *TYPES):
        raise SLTError(f"type {type!r} cannot be written; give auto, {', '.join(TYPES)}")
    if path.is_dir():
        raise SLTError(f"{path}: a folder; give the name of a file, such as {path / 'ticket.gguf'}")
    if not tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        hint = "save one there (tokenizer.save_pretrained), or give --tokenizer"
        raise SLTError(f"{folder}: there is no tokenizer in the model's folder; {hint}")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_expressible(config)
    words = read_vocabulary(load_fast_tokenizer(tokenizer or folder), config.vocab_size)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return write_gguf(model.merge_and_unload(), words, path, type)


def check_expressible(config: Any) -> None:
    """Check that llama.cpp can compute a model.

    Args:
        config:
            A supermask configuration.

    Raises:
        [`SLTError`]: if it cannot. The message names the option.
    """
    family = config.model_type.removeprefix("supermask_")
    if family not in ARCHITECTURES:
        raise SLTError(
            f"a {family} is exported in two steps: slt merge writes the stock checkpoint, and llama.cpp's own "
            f"convert_hf_to_gguf.py takes that; here {', '.join(ARCHITECTURES)} are written"
        )
    faults = [
        f"a {name}"
        for name in config.architectures or ()
        if not name.endswith(("LMHeadModel", "ForCausalLM"))
    ]
    faults += ["layer_norm=False"] if not config.layer_norm else []
    faults += list(_faults_of_gpt2(config) if family == "gpt2" else _faults_of_others(config, family))
    if faults:
        name = ARCHITECTURES[family].name
        raise SLTError(f"llama.cpp's {name} has no place for {faults[0]}; this ticket runs in Python only")


def _faults_of_gpt2(config: Any) -> Iterator[str]:
    width = config.n_embd // config.n_head
    if not config.qk_width == config.v_width == width:
        yield f"n_qk {config.qk_width}, n_v {config.v_width} (not n_embd / n_head = {width})"
    if config.head_bias:
        yield "head_bias=True"
    if config.activation_function not in _GELU:
        yield f"activation_function {config.activation_function!r}"
    if not config.scale_attn_weights:
        yield "scale_attn_weights=False"
    if config.scale_attn_by_inverse_layer_idx:
        yield "scale_attn_by_inverse_layer_idx=True"


def _faults_of_others(config: Any, family: str) -> Iterator[str]:
    kind = ARCHITECTURES[family]
    key = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    if getattr(config, key) not in kind.activations:
        yield f"{key} {getattr(config, key)!r}"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False) and not kind.biases:
            yield f"{name}=True"
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            yield f"{name}={getattr(config, name)}"
    for facts in _rope_parameters(config).values():
        rope = facts.get("rope_type", "default")
        if rope not in (("default", "linear", "llama3") if kind.rope_factors else ("default",)):
            yield f"rope_type {rope!r}"
        if facts.get("partial_rotary_factor", 1) != 1:
            yield f"partial_rotary_factor {facts['partial_rotary_factor']}"
    layers = getattr(config, "layer_types", None) or []
    if family == "gemma3_text":
        every = _period(layers)
        if [(index + 1) % every != 0 for index in range(len(layers))] != _slides(layers):
            yield "layer_types without a period"
    else:
        window = getattr(config, "sliding_window", None)
        slides = any(_slides(layers)) if layers else bool(window)
        if slides and window < config.max_position_embeddings:
            yield f"sliding_window {window}, shorter than max_position_embeddings"


def _slides(layers: list[str]) -> list[bool]:
    return [layer == "sliding_attention" for layer in layers]


def _period(layers: list[str]) -> int:
    """Return the number, from 1, of the first layer with full attention; if none has it, one more than the last."""
    return [*_slides(layers), False].index(False) + 1


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters of rotations by kind of layer."""
    found = config.rope_parameters
    return {"full_attention": found} if "rope_theta" in found else found


# -- the file ----------------------------------------------------------------------------------------------


def write_gguf(stock: Any, words: Vocabulary, path: Path, type: str = "auto") -> str:
    """Write a stock GPT-2 and its vocabulary as one GGUF file.

    Args:
        stock:
            A stock GPT-2.
        words ([`Vocabulary`]):
            The vocabulary of its tokenizer.
        path (`Path`):
            The file.
        type (`str`, defaults to `"auto"`):
            How weights are stored, a key of `TYPES`, or `"auto"`.

    Returns:
        `str`: the same lines as `export_gguf`.

    Raises:
        [`SLTError`]: if the package gguf is missing, or if the type cannot hold the weights.
    """
    import gguf

    tensors = dict(tensors_of(stock))
    matrices = {
        name: rows for name, rows in tensors.items() if rows.ndim == 2 and name != "position_embd.weight"
    }
    types = dict.fromkeys(tensors, "f32") | choose_types(matrices, type, TABLES)
    main = max(TYPES, key=lambda one: sum(rows.size for name, rows in matrices.items() if types[name] == one))
    try:
        with replacing(path) as new:
            writer: Any = gguf.GGUFWriter(new, ARCHITECTURES[stock.config.model_type].name)
            writer.add_file_type(TYPES[main].file_number)
            write_sizes(writer, stock.config)
            words.write(writer, stock.config.vocab_size)
            for name, rows in tensors.items():
                kind = TYPES[types[name]]
                bytes = rows.size // kind.block * kind.bytes
                # The writer does not know all types. Given float32, it writes shape and type number unchanged.
                writer.add_tensor_info(name, rows.shape, np.dtype(np.float32), bytes, kind.number)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, rows in tensors.items():
                writer.write_tensor_data(pack(rows, types[name]))
            writer.close()
        bytes = path.stat().st_size
    except OSError as error:
        raise SLTError(f"{path}: cannot be written ({error.strerror}); give another path") from error
    lines = [f"{path}: {bytes:,} bytes", *describe_types(matrices, types, type)]
    if words.normalizes:
        lines.append(
            "not in llama.cpp: the tokenizer's NFC; text in another form of Unicode is split in another way"
        )
    return "\n".join(lines)


def write_sizes(writer: Any, config: Any) -> None:
    """Write the sizes of a model into the header of a file, under the keys of its architecture.

    Args:
        writer (`gguf.GGUFWriter`):
            The writer of the file.
        config (`PreTrainedConfig`):
            The stock configuration of the model.
    """
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    width = _head_width(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    rope = _rope_parameters(config)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(_period(config.layer_types))
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def tensors_of(stock: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a stock model under the names of llama.cpp. Matrices have one row per output.

    Args:
        stock (`PreTrainedModel`):
            A stock model of one of `ARCHITECTURES`.

    Yields:
        `tuple[str, np.ndarray]`: name and values of each tensor.

    Raises:
        [`SLTError`]: if llama.cpp has no name for a parameter.
    """
    import gguf

    config = stock.config
    kind = ARCHITECTURES[config.model_type]
    number = gguf.MODEL_ARCH[kind.name.upper()]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for path, parameter in stock.state_dict().items():
        if path == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(path, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise SLTError(f"{path} has no place in llama.cpp's {kind.name}; this ticket runs in Python only")
        owner = path.rpartition(".")[0]
        array = parameter.float().numpy()
        if isinstance(stock.get_submodule(owner), Conv1D) and array.ndim == 2:
            array = array.T
        if "_norm." in name and name.endswith(".weight"):
            array = array + np.float32(kind.added_gain)
        if owner.endswith(".q_norm") and config.model_type == "gemma3_text":
            # llama.cpp divides by the square root of the width, whatever query_pre_attn_scalar is.
            array = array * np.float32((_head_width(config) / config.query_pre_attn_scalar) ** 0.5)
        if kind.neighbours and owner.endswith((".q_proj", ".k_proj")):
            array = _neighbours(array, _head_width(config))
        yield name, array
    if kind.rope_factors:
        (facts,) = _rope_parameters(config).values()
        if facts.get("rope_type", "default") != "default":
            plain = facts["rope_theta"] ** -(np.arange(0, 1, 2 / _head_width(config)))
            yield "rope_freqs.weight", (plain / stock.model.rotary_emb.inv_freq.numpy()).astype(np.float32)


def _head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _neighbours(array: np.ndarray, width: int) -> np.ndarray:
    """Reorder the rows of each head: rows that are rotated together were half a head apart, and become neighbours."""
    heads = array.reshape(-1, 2, width // 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)
