"""Configuration of a supermask GPT-2: GPT-2's own options, the seed, and how masks are found.

Everything that fixes a frozen weight is here, so that a config and a seed are the weights. A tensor is known
by its name, which is stock GPT-2's, relative to the base model ("h.0.attn.c_proj"); query, key and value,
which stock GPT-2 lays side by side in one matrix, have names of their own ("h.0.attn.c_attn.query"):

    spec   = config.tensor(name)       # name, shape, seed, law, scale, factors, rule
    weight = spec.draw()
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, GPT2Config
from transformers.activations import ACT2FN
from transformers.utils import logging

from .quantisation import BITS
from .random_weights import GENERATOR, LAWS, TensorSpec

logger = logging.get_logger(__name__)

# Keys that transformers itself passes, stores beside the declared fields or moves to another configuration.
_KNOWN_EXTRAS = frozenset(
    "model_type auto_map name_or_path _name_or_path _commit_hash torch_dtype num_labels use_return_dict "
    "output_attentions attn_implementation experts_implementation per_layer_config tokenizer_class "
    "task_specific_params finetuning_task torchscript use_bfloat16 prefix is_decoder sep_token_id "
    "decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder pruned_heads tf_legacy_loss "
    "_attn_implementation_internal _experts_implementation_internal distributed_config".split()
).union(GenerationConfig().to_dict())
# What gives a rule's options their defaults, and refuses those of others; training brings it along.
SETTLERS: list[Callable[["SupermaskGPT2Config"], None]] = []
RULE_OPTIONS = ("density", "densities", "mask_bits", "threshold", "n_of_m")
# What belongs to a mask, of which one backbone may have several.
MASK_OPTIONS = ("rule", *RULE_OPTIONS, "factors", "search", "frozen_density", "mask_digest")
EMBEDDINGS = ("wte", "wte.rows", "wpe", "lm_head")  # an untied head follows the embeddings
INPUTS_FIRST = ("h.", "wte.basis")  # how names of tensors begin that are (inputs, outputs), as Conv1D
# A ticket that was trained with another head may lack these.
HEADS = ("lm_head", "score", "lm_head.scale", "score.scale", "head_bias")
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
    rule: str = _option(
        "edge_popup",
        "How scores become a mask: edge_popup (keep the largest magnitudes), global (of all tensors"
        " together), n_m (n of every m inputs), threshold, bernoulli, sign, signed, multicoat or multibit.",
    )
    density: float | int | None = _option(
        None, "Fraction kept, in (0, 1], of rules edge_popup (0.3 by default), global (0.3) and signed (0.6)."
    )
    densities: list | None = _option(
        None, "Rule multicoat: falling densities of its nested masks; [0.3, 0.0788, 0.0315] by default."
    )
    mask_bits: int | None = _option(None, "Rule multibit: bits of a code, 2 (default), 3 or 4.")
    threshold: float | None = _option(None, "Rule threshold: keep larger scores; 0.005 by default.")
    n_of_m: list | None = _option(None, "Rule n_m: n and m, [2, 4] by default.")
    search: float | int = _option(
        1.0, "Share of each masked tensor that is searched; the seed decides what is kept of the rest."
    )
    frozen_density: float | int | None = _option(
        None, "With search below 1: fraction kept of the rest; the rule's density by default, or all or half."
    )
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
    layer_norm: bool | str = _option(
        True, "Keep GPT-2's LayerNorms; false removes them, as in the theory; trained learns their gains."
    )
    scales: Literal["none", "tensor", "row"] = _option(
        "none", "Learn a factor for each masked tensor, or for each of its outputs (of a table: each row)."
    )
    scale_bits: int = _option(16, "Bits of a learned scale, gain or bias in the ticket: 32, 16 or 8.")
    head_bias: bool = _option(False, "Learn a bias for the logit of every token.")
    embedding: Literal["masked", "frozen", "trained"] = _option(
        "masked", "Embeddings: masked as all weights, frozen (random, all kept) or trained and stored."
    )
    embedding_bits: int = _option(32, "Bits of a trained embedding value in the ticket: 32, 8 or 4.")
    embedding_rank: int | None = _option(
        None,
        "Trained embeddings: stored numbers a token, times a masked basis; n_embd, and none, by default.",
    )
    n_qk: int | None = _option(None, "Width of a query and key per head; n_embd / n_head by default.")
    n_v: int | None = _option(None, "Width of a value per head; n_embd / n_head by default.")
    resid_pdrop: float | int = 0.1  # GPT-2's own; some versions of transformers would refuse a plain 0
    embd_pdrop: float | int = 0.1
    attn_pdrop: float | int = 0.1
    # Set by the library: whether this is a model that learns; the generator's version; a digest of all masks.
    factors: Any = None  # what codes stand for: all that a ticket needs to know of its rule
    state: Literal["scores", "ticket"] = "scores"
    weight_generator: str = GENERATOR
    mask_digest: str | None = None

    def __post_init__(self, **kwargs):
        names = [field.name for field in dataclasses.fields(self)]
        for name in sorted(kwargs.keys() - _known(type(self))):  # transformers would take it in silence
            near = difflib.get_close_matches(name, names, n=1)
            cure = f"did you mean {near[0]!r}?" if near else "see help(SupermaskGPT2Config)"
            raise ValueError(f"unknown option {name!r} for SupermaskGPT2Config; {cure}")
        if (kwargs.get("num_labels") or 0) > 1 << 20:  # transformers makes a name for each
            raise ValueError(f"num_labels {kwargs['num_labels']} is more than a million")
        super().__post_init__(**kwargs)
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(self, name, getattr(self, name) + 0.0)  # as every version reads it
        if self.state == "scores" or self.factors is None:
            for settle in SETTLERS:
                settle(self)
        self.factors = [0.0, 1.0] if self.factors is None else self.factors
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in transformers. A key of a file that is no option is kept, with a warning, not an error."""
        extras = {name: config_dict[name] for name in sorted(config_dict.keys() - _known(cls))}
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
        choices: dict[str, tuple] = {"law": LAWS, "embedding_law": (None, *LAWS), "scale_bits": (32, 16, 8)}
        choices |= {"embedding_bits": (32, *BITS), "layer_norm": (True, False, "trained")}
        choices |= {"activation_function": tuple(ACT2FN)}  # those of a Literal type were checked before
        choices |= {"add_cross_attention": (False,), "reorder_and_upcast_attn": (False,)}
        for name, known in choices.items():
            shown = ", ".join(map(repr, known))
            need(getattr(self, name) in known, f"{name} {getattr(self, name)!r} is not one of {shown}")
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions", "n_inner", "n_qk", "n_v"):
            size = getattr(self, name)
            need(size is None or size > 0, f"{name} {size} is not positive")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            share = getattr(self, name)
            need(0 <= share <= 1, f"{name} {share} is not in 0 .. 1: it is a probability")
        bits, kept, search, qk = self.embedding_bits, self.frozen_density, self.search, self.qk_scale
        trained, generator, floating = self.embedding == "trained", self.weight_generator, "is_floating_point"
        need(bits == 32 or trained, f"embedding_bits {bits}: give embedding='trained' as well")
        if (rank := self.embedding_rank) is not None:
            need(0 < rank <= self.n_embd, f"embedding_rank {rank} is not in 1 .. n_embd {self.n_embd}")
            cure = "give embedding='trained' and tie_word_embeddings=True as well"
            need(trained and self.tie_word_embeddings, f"embedding_rank {rank}: {cure}")
        cure = "install the version of hf_slt that made the ticket"
        need(generator == GENERATOR, f"weight_generator {generator!r} is not {GENERATOR!r}; {cure}")
        need(getattr(self.dtype, floating, self.dtype is None), f"dtype {self.dtype} is none of float")
        need(0 < search <= 1, f"search {search} is not in (0, 1]: it is the share of weights searched")
        outside = f"frozen_density {kept} is kept, of 0 .. 1, of what is not searched"
        need(kept is None or (0 <= kept <= 1 and search < 1), f"{outside}; give a search below 1 as well")
        numbers = {one for one in self.factors if type(one) is float and math.isfinite(one)}
        distinct = 2 <= len(numbers) == len(self.factors) <= 16
        need(distinct, f"factors {str(self.factors)[:99]} are not 2 to 16 different numbers")
        need(0 <= self.seed < 2**64, f"seed {self.seed} is not in 0 .. 2**64 - 1")
        positive = qk == "paper" if isinstance(qk, str) else qk > 0 and math.isfinite(qk)
        need(positive, f"qk_scale {qk!r} is neither 'paper' nor a positive number")
        fits = (self.n_qk and self.n_v) or self.n_embd % self.n_head == 0
        cure = "change one of them, or give n_qk and n_v, the widths of a head"
        need(fits, f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: {cure}")

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
        inside = [name for name in self._shapes() if name.startswith(("attn", "mlp"))]
        names = ["wte.rows", "wte.basis", "wpe"] if self.embedding_rank else ["wte", "wpe"]
        if self.layer_norm == "trained":
            inside, names = [*inside, "ln_1", "ln_2"], [*names, "ln_f"]
        names += [f"h.{block}.{name}" for block in range(self.n_layer) for name in inside]
        return names + self.scale_names(*names)

    def scale_names(self, *names: str) -> list[str]:
        """The names of the learned scales of tensors."""
        masked = [name for name in names if self.scales != "none" and self.kind_of(name) == "masked"]
        return [f"{name}.scale" for name in masked]

    def tensor(self, name: str) -> TensorSpec:
        """The description of one tensor."""
        law, scale = self.law_of(name)
        shape, factors = self.shape_of(name), tuple(self.factors)
        search = self.search, 1.0 if self.frozen_density is None else self.frozen_density
        return TensorSpec(name, shape, self.seed, law, scale, factors, *search, self.rule, self.rule_options)

    @property
    def rule_options(self) -> tuple[tuple[str, Any], ...]:
        """The options of the rule, by name."""
        options = ((name, getattr(self, name)) for name in RULE_OPTIONS)
        given = ((name, one) for name, one in options if one is not None)
        return tuple((name, tuple(one) if isinstance(one, list) else one) for name, one in given)

    def kind_of(self, name: str) -> str:
        """What becomes of a tensor: "masked", "frozen" (all of it kept) or "trained" (its values stored)."""
        if self._is_vector(name):
            return "trained"
        return self.embedding if name in EMBEDDINGS else "masked"

    @staticmethod
    def _is_vector(name: str) -> bool:
        """Whether a tensor is a row of numbers that are learned: scales, gains or biases."""
        return name.rsplit(".", 1)[-1] in ("scale", "ln_1", "ln_2", "ln_f", "head_bias")

    def bits_of(self, name: str) -> int:
        """Bits of a trained value of a tensor in the ticket."""
        return self.scale_bits if self._is_vector(name) else self.embedding_bits

    def shape_of(self, name: str) -> tuple[int, int]:
        """Rows and columns: inputs and outputs within a block, the other way in tables and heads."""
        if name.endswith(".scale"):
            rows, columns = self.shape_of(name.removesuffix(".scale"))
            return 1, 1 if self.scales == "tensor" else columns if name.startswith(INPUTS_FIRST) else rows
        if self._is_vector(name):
            return 1, self.vocab_size if name == "head_bias" else self.n_embd
        inside = name.split(".", 2)[-1] if name.startswith("h.") else name
        return self._shapes()[inside]

    def _shapes(self) -> dict[str, tuple[int, int]]:
        width, qk, v = self.n_embd, self.n_head * self.qk_width, self.n_head * self.v_width
        return {
            "wte": (self.vocab_size, width),
            "wte.rows": (self.vocab_size, self.embedding_rank or width),
            "wte.basis": (self.embedding_rank or width, width),
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
        if self._is_vector(name):
            return "constant", 0.0 if leaf == "head_bias" else 1.0
        embedding = name in EMBEDDINGS
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
            if leaf == "basis":  # what it makes of a row is as large as the row
                scale = 1 / math.sqrt(self.embedding_rank or 1)
        if leaf in ("query", "key"):
            # Two square roots: IEEE rounds them alike everywhere, which pow() does not promise.
            paper = math.sqrt(math.sqrt(self.qk_width))
            scale *= paper if isinstance(self.qk_scale, str) else self.qk_scale
        return law, scale


def _known(cls: type[GPT2Config]) -> set[str]:
    declared = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    return declared | _KNOWN_EXTRAS


def need(good: Any, message: str) -> None:
    """Raise ValueError unless this is so."""
    if not good:
        raise ValueError(message)
