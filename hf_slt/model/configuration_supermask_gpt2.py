"""Configuration of a supermask GPT-2: GPT-2's own options, the seed, and how masks are found.

Everything that fixes a frozen weight is here, so that a config and a seed are the weights. A tensor is known
by its name, which is stock GPT-2's, relative to the base model ("h.0.attn.c_proj"); query, key and value,
which stock GPT-2 lays side by side in one matrix, have names of their own ("h.0.attn.c_attn.query"):

    spec   = config.tensor(name)       # name, shape, seed, law, scale, rule, density
    weight = spec.draw()
"""

import dataclasses
import difflib
import math
from functools import cache
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, GPT2Config
from transformers.activations import ACT2FN
from transformers.utils import logging

from .quantisation import BITS
from .random_weights import GENERATOR, LAWS, TensorSpec

logger = logging.get_logger(__name__)

# Keys that transformers itself passes or stores beside the declared fields.
_KNOWN_EXTRAS = frozenset(
    "model_type auto_map name_or_path _name_or_path _commit_hash torch_dtype num_labels use_return_dict "
    "output_attentions attn_implementation experts_implementation per_layer_config tokenizer_class "
    "task_specific_params finetuning_task torchscript use_bfloat16 prefix is_decoder sep_token_id "
    "decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder pruned_heads tf_legacy_loss "
    "_attn_implementation_internal _experts_implementation_internal distributed_config".split()
)
RULES = ("edge_popup",)
EMBEDDINGS = ("wte", "wpe", "lm_head")  # an untied head follows the embeddings
HEADS = ("lm_head", "score")  # a ticket that was trained with another head may lack them
_GPT2_WIDTH = 768  # the width that GPT-2's initializer_range of 0.02 was made for


class SLTError(ValueError):
    """Something the user can mend; the message names the value and the cure."""


class TicketError(SLTError):
    """A ticket is damaged, incomplete, of another backbone or of an unknown version."""


def _option(default, text: str):
    """A field that a user may set; the help is what command lines show."""
    return dataclasses.field(default=default, metadata={"help": text})


@strict
class SupermaskGPT2Config(GPT2Config):
    """GPT-2 whose weights are drawn from `seed` and never trained; only a mask over them is learned.

    Args, beyond those of [`GPT2Config`]: see the help of each field. Of the laws, `"normal"` is GPT-2's, with
    std `initializer_range`, divided by sqrt(2 n_layer) for the two projections into the residual stream;
    `"signed_constant"` is plus or minus that std; `"uniform"` is U[-1, 1], as the theory of strong lottery
    tickets asks; `"xavier_uniform"` is U[-b, b], b = sqrt(6 / (rows + columns)).

    >>> config = SupermaskGPT2Config(n_embd=512, n_head=8, n_layer=4, seed=7)
    >>> config.law_of("h.0.attn.c_attn.query")
    ('normal', 0.05656854249492381)
    """

    model_type = "supermask_gpt2"

    seed: int = _option(
        0, "Seed of the frozen weights and the first scores; in training also of text order and dropout."
    )
    density: float | int = _option(0.3, "Fraction of each masked tensor that is kept, in (0, 1].")
    rule: str = _option("edge_popup", "How scores become a mask: edge_popup keeps the largest magnitudes.")
    law: str = _option(
        "normal", "Distribution of the frozen weights: normal, signed_constant, uniform or xavier_uniform."
    )
    embedding_law: str | None = _option(None, "Distribution of the embeddings, if another than law.")
    embedding_range: float | None = _option(
        None, "Standard deviation of the embeddings, if another than initializer_range."
    )
    qk_scale: float | int | str = _option(
        "paper", "Factor on query and key weights: a number, or paper for n_qk ** (1/4)."
    )
    # In the blocks times sqrt(768 / n_embd), which keeps the size of what a layer puts out; in the embeddings
    # times 768 / n_embd, which keeps the largest logit that a choice of their entries can reach: these add up
    # like n_embd when a mask may pick them by sign, not like its root. Else narrow models stay at chance.
    scale_with_width: bool = _option(
        False, "Fit initializer_range, made for width 768, to this width; narrow models need it."
    )
    layer_norm: bool = _option(True, "Keep GPT-2's LayerNorms; false removes them, as in the theory.")
    embedding: Literal["masked", "frozen", "trained"] = _option(
        "masked", "Embeddings: masked as all weights, frozen (random, all kept) or trained and stored."
    )
    embedding_bits: int = _option(32, "Bits of a trained embedding value in the ticket: 32, 8 or 4.")
    n_qk: int | None = _option(None, "Width of a query and key per head; n_embd / n_head by default.")
    n_v: int | None = _option(None, "Width of a value per head; n_embd / n_head by default.")
    # Set by the library: whether this is a model that learns; the generator's version; a digest of all masks.
    state: Literal["scores", "ticket"] = "scores"
    weight_generator: str = GENERATOR
    mask_digest: str | None = None

    def __post_init__(self, **kwargs):
        _refuse_unknown(type(self), kwargs)
        if (kwargs.get("num_labels") or 0) > 1 << 20:  # transformers makes a name for each
            raise ValueError(f"num_labels {kwargs['num_labels']} is more than a million")
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in transformers. A key of a file that is no option is kept, with a warning, not an error."""
        extras = {name: value for name, value in config_dict.items() if name not in _known(cls)}
        known = {name: value for name, value in config_dict.items() if name not in extras}
        try:
            loaded = super().from_dict(known, **kwargs)
            for name, value in extras.items():
                logger.warning(f"the configuration holds {name!r}, which is no option of SupermaskGPT2Config")
                if hasattr(cls, name):
                    raise ValueError(f"{name!r} is no option, and is needed for other things")
                setattr(loaded[0] if isinstance(loaded, tuple) else loaded, name, value)
        except Exception as error:  # of any kind, as a stranger's file can raise them
            raise TicketError(f"a configuration that no model can have: {error}") from error
        return loaded

    def check(self) -> None:
        """Raise ValueError, naming the value and the cure, for an option that cannot be."""
        _one_of("law", self.law, LAWS)
        _one_of("embedding_law", self.embedding_law, (None, *LAWS))
        _one_of("embedding", self.embedding, ("masked", "frozen", "trained"))
        _one_of("state", self.state, ("scores", "ticket"))
        _one_of("rule", self.rule, RULES)
        _one_of("activation_function", self.activation_function, tuple(ACT2FN))
        _one_of("embedding_bits", self.embedding_bits, (32, *BITS))
        if self.embedding_bits != 32 and self.embedding != "trained":
            bits, cure = self.embedding_bits, "give embedding='trained' as well"
            raise ValueError(
                f"embedding_bits {bits} is for trained embeddings, not {self.embedding!r}; {cure}"
            )
        if self.weight_generator != GENERATOR:
            cure = "install the version of hf_slt that made the ticket"
            raise ValueError(f"weight_generator {self.weight_generator!r} is not {GENERATOR!r}; {cure}")
        if not getattr(self.dtype, "is_floating_point", self.dtype is None):
            raise ValueError(f"dtype {self.dtype} is none that a model computes in; give one of float")
        if not 0 < self.density <= 1:
            raise ValueError(f"density {self.density} is not in (0, 1]: it is the fraction of weights kept")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is not in 0 .. 1: it is a probability")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed} is not in 0 .. 2**64 - 1")
        if isinstance(self.qk_scale, str) and self.qk_scale != "paper":
            raise ValueError(f"qk_scale {self.qk_scale!r} is neither 'paper' nor a number")
        if not isinstance(self.qk_scale, str) and not (self.qk_scale > 0 and math.isfinite(self.qk_scale)):
            raise ValueError(f"qk_scale {self.qk_scale} is not a positive number")
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive")
        for name in ("n_inner", "n_qk", "n_v"):
            width = getattr(self, name)
            if width is not None and width < 1:
                raise ValueError(f"{name} {width} is not positive; None takes GPT-2's own width")
            if width is None and name != "n_inner" and self.n_embd % self.n_head:
                raise ValueError(
                    f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: change one of them, "
                    "or give n_qk and n_v, the widths of a head"
                )
        for name in ("add_cross_attention", "reorder_and_upcast_attn"):
            if getattr(self, name):
                raise ValueError(f"{name}=True is not supported by supermask GPT-2; leave it False")

    @property
    def qk_width(self) -> int:
        """Width of a query and of a key, per head."""
        return self.n_qk if self.n_qk is not None else self.n_embd // self.n_head

    @property
    def v_width(self) -> int:
        """Width of a value, per head."""
        return self.n_v if self.n_v is not None else self.n_embd // self.n_head

    @property
    def mlp_width(self) -> int:
        """Width of the hidden layer of an MLP."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    def tensor_names(self) -> list[str]:
        """The names of all tensors of the base model; a head of its own comes beside them."""
        inside = [name for name in self._shapes() if "." in name]
        return ["wte", "wpe", *(f"h.{block}.{name}" for block in range(self.n_layer) for name in inside)]

    def tensor(self, name: str) -> TensorSpec:
        """The description of one tensor."""
        law, scale = self.law_of(name)
        return TensorSpec(name, self.shape_of(name), self.seed, law, scale, self.rule, self.density)

    def kind_of(self, name: str) -> str:
        """What becomes of a tensor: "masked", "frozen" (all of it kept) or "trained" (its values stored)."""
        return self.embedding if name in EMBEDDINGS else "masked"

    def shape_of(self, name: str) -> tuple[int, int]:
        """Rows and columns: inputs and outputs within a block, the other way in tables and heads."""
        inside = name.split(".", 2)[-1] if name.startswith("h.") else name
        return self._shapes()[inside]

    def _shapes(self) -> dict[str, tuple[int, int]]:
        width, qk, v = self.n_embd, self.n_head * self.qk_width, self.n_head * self.v_width
        return {
            "wte": (self.vocab_size, width),
            "wpe": (self.n_positions, width),
            "attn.c_attn.query": (width, qk),
            "attn.c_attn.key": (width, qk),
            "attn.c_attn.value": (width, v),
            "attn.c_proj": (v, width),
            "mlp.c_fc": (width, self.mlp_width),
            "mlp.c_proj": (self.mlp_width, width),
            "lm_head": (self.vocab_size, width),
            "score": (self.num_labels or 2, width),
        }

    def law_of(self, name: str) -> tuple[str, float]:
        """Law and scale of a tensor."""
        leaf = name.rsplit(".", 1)[-1]
        embedding = leaf in EMBEDDINGS
        law = self.embedding_law or self.law if embedding else self.law
        scale = 1.0
        if law in ("normal", "signed_constant"):
            scale = self.initializer_range
            if embedding and self.embedding_range is not None:
                scale = self.embedding_range
            if self.scale_with_width:
                widening = _GPT2_WIDTH / self.n_embd
                scale *= widening if embedding else math.sqrt(widening)
            if leaf == "c_proj":
                scale /= math.sqrt(2 * self.n_layer)
        if leaf in ("query", "key"):
            # Two square roots: IEEE rounds them alike everywhere, which pow() does not promise.
            paper = math.sqrt(math.sqrt(self.qk_width))
            scale *= paper if isinstance(self.qk_scale, str) else self.qk_scale
        return law, scale


def _refuse_unknown(cls: type[GPT2Config], extras: dict) -> None:
    """A misspelled option must not be taken in silence, as transformers does."""
    for name in extras:
        if name not in _known(cls):
            near = difflib.get_close_matches(name, [field.name for field in dataclasses.fields(cls)], n=1)
            cure = f"did you mean {near[0]!r}?" if near else "see help(SupermaskGPT2Config)"
            raise ValueError(f"unknown option {name!r} for SupermaskGPT2Config; {cure}")


def _known(cls: type[GPT2Config]) -> set[str]:
    declared = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    return declared | _KNOWN_EXTRAS | _generation_options()


@cache
def _generation_options() -> frozenset[str]:  # transformers moves these to the generation config
    return frozenset(GenerationConfig().to_dict())


def _one_of(name: str, value: str | int | None, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(map(repr, choices))}")
