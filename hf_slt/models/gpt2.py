"""Supermask GPT-2: stock GPT-2 whose weights follow from a seed and a mask, and options that only GPT-2 has.

A tensor has the name of stock GPT-2, relative to the base model ("h.0.attn.c_proj"). Query, key and value,
which stock GPT-2 has side by side in one matrix, have names of their own ("h.0.attn.c_attn.query"):

    spec   = config.tensor(name)       # name, shape, seed, law, scale, factors
    weight = spec.draw()

In addition to the options of every supermask model there are: query/key and value widths of their own (the theory of
strong lottery tickets needs wide heads), no LayerNorm, a low-rank token embedding, and a bias of the logits.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import Conv1D, GPT2Attention, eager_attention_forward

from ..errors import require
from ..masks.plans import (
    FixedPlan,
    LowRankPlan,
    MaskedPlan,
    ParameterPlan,
    StoredTensor,
    TiedPlan,
    TrainedPlan,
)
from ..weights.random_weights import LAWS_WITH_STD, TensorSpec
from .auto import register_architecture
from .configuration import SupermaskConfigMixin, SupermaskOptions, option
from .loss import causal_lm_loss
from .modeling import SupermaskGenerationMixin, SupermaskMixin

_GPT2_WIDTH = 768  # the width that GPT-2's initializer_range of 0.02 was made for
_EMBEDDINGS = ("wte", "wte.rows", "wpe", "lm_head")  # an untied head follows the embeddings
_VECTORS = ("scale", "ln_1", "ln_2", "ln_f", "head_bias")  # rows of trained numbers
_INPUTS_FIRST = ("h.", "wte.basis")  # tensors whose names begin so are (inputs, outputs), as in Conv1D


@strict
@dataclasses.dataclass(kw_only=True)
class GPT2Options(SupermaskOptions):
    """The options of a supermask GPT-2."""

    embedding_rank: int | None = option(
        None, "Rank of the trained token embedding (rows @ masked basis). Default: a full table."
    )
    n_qk: int | None = option(None, "Width of a query and key per head. Default: n_embd / n_head.")
    n_v: int | None = option(None, "Width of a value per head. Default: n_embd / n_head.")


class SupermaskGPT2Config(SupermaskConfigMixin, GPT2Config):
    """Configuration of a GPT-2 whose weights are drawn from `seed` and never trained; a mask over them is learned.

    Args:
        supermask (`dict`, *optional*):
            All options that stock GPT-2 does not have, in one object. Each may also be given as a keyword; the help
            of [`GPT2Options`] explains them. The law `"normal"` is that of GPT-2, with standard deviation
            `initializer_range`, divided by sqrt(2 n_layer) for the two projections into the residual stream;
            `"signed_constant"` is plus or minus that deviation; `"uniform"` is U[-1, 1], as the theory of strong
            lottery tickets assumes; `"xavier_uniform"` is U[-b, b], b = sqrt(6 / (rows + columns)).
        kwargs:
            Options of [`GPT2Config`].

    Example:

    >>> config = SupermaskGPT2Config(n_embd=512, n_head=8, n_layer=4, seed=7)
    >>> config.law_of("h.0.attn.c_attn.query")
    ('normal', 0.05656854249492381)
    """

    model_type = "supermask_gpt2"
    options_class = GPT2Options

    supermask: Any = None

    def check_model(self) -> None:
        """Raise `ValueError` for an impossible option."""
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            setattr(
                self, name, getattr(self, name) + 0.0
            )  # the file then has a float, which every version can read
        choices: dict[str, tuple] = {
            "activation_function": tuple(ACT2FN),
            "add_cross_attention": (False,),
            "reorder_and_upcast_attn": (False,),
        }
        for name, known in choices.items():
            shown = ", ".join(map(repr, known))
            require(getattr(self, name) in known, f"{name} {getattr(self, name)!r} is not one of {shown}")
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions", "n_inner", "n_qk", "n_v"):
            size = getattr(self, name)
            require(size is None or size > 0, f"{name} {size} is not positive")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            share = getattr(self, name)
            require(0 <= share <= 1, f"{name} {share} is not in 0 .. 1: it is a probability")
        require(
            getattr(self.dtype, "is_floating_point", self.dtype is None),
            f"dtype {self.dtype} is not a floating-point type",
        )
        if (rank := self.embedding_rank) is not None:
            require(0 < rank <= self.n_embd, f"embedding_rank {rank} is not in 1 .. n_embd {self.n_embd}")
            require(
                self.embedding == "trained" and self.tie_word_embeddings,
                f"embedding_rank {rank}: give embedding='trained' and tie_word_embeddings=True as well",
            )
        for name in ("head_bias", "embedding_rank", "n_qk", "n_v"):
            own = getattr(self, name)
            require(
                not self.backbone or not own,
                f"{name} {own}: a backbone is stock GPT-2; leave one of them out",
            )
        require(
            (self.n_qk and self.n_v) or self.n_embd % self.n_head == 0,
            f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: change one of them, or give n_qk "
            "and n_v, the widths of a head",
        )

    @staticmethod
    def auto_classes() -> dict[str, str]:
        """Return the name of our class for each Auto class.

        Returns:
            `dict[str, str]`: names of our classes by Auto class.
        """
        return {
            "AutoConfig": "SupermaskGPT2Config",
            "AutoModel": "SupermaskGPT2Model",
            "AutoModelForCausalLM": "SupermaskGPT2LMHeadModel",
            "AutoModelForSequenceClassification": "SupermaskGPT2ForSequenceClassification",
        }

    def stock_config(self) -> GPT2Config:
        """Return the configuration of the stock model that computes the same.

        Returns:
            `GPT2Config`: a configuration of stock GPT-2.

        Raises:
            `ValueError`: if stock GPT-2 cannot have this structure.
        """
        if not self.layer_norm:
            raise ValueError(
                "stock GPT-2 always has LayerNorm; a model with layer_norm=False cannot be merged"
            )
        if self.has_free_widths:
            raise ValueError(
                f"stock GPT-2 has heads of n_embd / n_head = {self.n_embd / self.n_head:g}; n_qk {self.qk_width} "
                f"and n_v {self.v_width} cannot be merged"
            )
        if self.head_bias:
            raise ValueError(
                "stock GPT-2 has no bias of its logits; a model with head_bias=True cannot be merged"
            )
        names = {one.name for one in dataclasses.fields(GPT2Config)} - {"architectures"}
        return GPT2Config(**{name: getattr(self, name) for name in names})

    @property
    def qk_width(self) -> int:
        """Width of a query and of a key, per head."""
        return self.n_qk if self.n_qk is not None else self.n_embd // self.n_head

    @property
    def v_width(self) -> int:
        """Width of a value, per head."""
        return self.n_v if self.n_v is not None else self.n_embd // self.n_head

    @property
    def has_free_widths(self) -> bool:
        """Whether heads have widths that stock GPT-2 cannot have."""
        return not self.qk_width == self.v_width == self.n_embd / self.n_head

    @property
    def mlp_width(self) -> int:
        """Width of the hidden layer of an MLP."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    # -- tensors by name

    def tensor_names(self) -> list[str]:
        """Return the names of all tensors of the base model, without those of an untied head.

        Returns:
            `list[str]`: the names, such as `"h.0.attn.c_attn.query"`.
        """
        inside = [name for name in self._shapes() if name.startswith(("attn", "mlp"))]
        names = ["wte.rows", "wte.basis", "wpe"] if self.embedding_rank else ["wte", "wpe"]
        if self.layer_norm == "trained":
            inside, names = [*inside, "ln_1", "ln_2"], [*names, "ln_f"]
        names += [f"h.{block}.{name}" for block in range(self.n_layer) for name in inside]
        return names + self.scale_names(*names)

    def scale_names(self, *names: str) -> list[str]:
        """Return the names of the learned scales of tensors.

        Args:
            names:
                Names of tensors.

        Returns:
            `list[str]`: a name for each masked tensor among them. The list is empty if no scales are learned.
        """
        masked = [name for name in names if self.scales != "none" and self.kind_of(name) == "masked"]
        return [f"{name}.scale" for name in masked]

    def stored_tensors(self, saved: str | None = None) -> dict[str, StoredTensor]:
        """Return the tensors of the base model by name, as a ticket describes them. `saved`: see `head_tensors`."""
        if self._is_mixed:
            return super().stored_tensors(saved)
        return {name: self._stored_tensor(name) for name in self.tensor_names()}

    def head_tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors of all heads. A ticket that was trained with another head may lack them."""
        if self._is_mixed:
            return super().head_tensors()
        heads = ["lm_head", "score"]
        return {name: self._stored_tensor(name) for name in (*heads, *self.scale_names(*heads), "head_bias")}

    @property
    def _is_mixed(self) -> bool:
        """Whether the kind of a tensor cannot be seen from its name alone."""
        return bool(self.parameters or self.backbone)

    def model_class(self, name: str) -> Any:
        """Return one of our model classes by its name.

        Args:
            name (`str`):
                Name of the class, such as `"SupermaskGPT2LMHeadModel"`.

        Returns:
            The class.
        """
        return globals()[name]

    def _stored_tensor(self, name: str) -> StoredTensor:
        return StoredTensor(self.tensor(name), self.kind_of(name), self.bits_of(name))

    def tensor(self, name: str) -> TensorSpec:
        """Return the description of one tensor.

        Args:
            name (`str`):
                Name of the tensor.

        Returns:
            [`TensorSpec`]: its shape, seed, law, scale and factors.
        """
        law, scale = self.law_of(name)
        density = 1.0 if self.frozen_density is None else self.frozen_density
        inputs = (0,) if name.startswith(_INPUTS_FIRST) else (1,)
        shape, factors = self.shape_of(name), tuple(self.factors)
        state_bits = self.state_bits if self.kind_of(name) == "masked" else None
        return TensorSpec(
            name, shape, self.seed, law, scale, factors, self.search, density, inputs, state_bits
        )

    def kind_of(self, name: str) -> Literal["masked", "frozen", "trained"]:
        """Return the kind of a tensor: masked, frozen (all of it is kept) or trained (its values are stored).

        Args:
            name (`str`):
                Name of the tensor.

        Returns:
            `Literal['masked', 'frozen', 'trained']`: its kind.
        """
        if self._is_vector(name):
            return "trained"
        return self.embedding if name in _EMBEDDINGS else "masked"

    @staticmethod
    def _is_vector(name: str) -> bool:
        """Return whether a tensor is a row of numbers that are trained: scales, gains or biases."""
        return name.rsplit(".", 1)[-1] in _VECTORS

    def bits_of(self, name: str) -> int:
        """Return the bits of a trained value of a tensor in the ticket.

        Args:
            name (`str`):
                Name of the tensor.

        Returns:
            `int`: number of bits.
        """
        return self.scale_bits if self._is_vector(name) else self.embedding_bits

    def shape_of(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a tensor: inputs and outputs within a block, the other way in tables and heads.

        Args:
            name (`str`):
                Name of the tensor.

        Returns:
            `tuple[int, int]`: rows and columns.
        """
        if name.endswith(".scale"):
            rows, columns = self.shape_of(name.removesuffix(".scale"))
            return 1, 1 if self.scales == "tensor" else columns if name.startswith(_INPUTS_FIRST) else rows
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
        """Return law and scale of a tensor.

        Args:
            name (`str`):
                Name of the tensor.

        Returns:
            `tuple[str, float]`: law and scale.
        """
        leaf = name.rsplit(".", 1)[-1]
        if self._is_vector(name):
            return "constant", 0.0 if leaf == "head_bias" else 1.0
        embedding = name in _EMBEDDINGS
        law = self.embedding_law or self.law if embedding else self.law
        scale = 1.0
        if law in LAWS_WITH_STD:
            scale = self.initializer_range
            if embedding and self.embedding_range is not None:
                scale = self.embedding_range
            if self.scale_with_width:
                widening = _GPT2_WIDTH / self.n_embd
                scale *= widening if embedding else math.sqrt(widening)
            if leaf == "c_proj":
                scale /= math.sqrt(2 * self.n_layer)
            if leaf == "basis":  # rows keep their size when they are multiplied by the basis
                scale = 1 / math.sqrt(self.embedding_rank or 1)
        if leaf in ("query", "key"):
            # Two square roots: IEEE rounds them in the same way everywhere, unlike pow().
            paper = math.sqrt(math.sqrt(self.qk_width))
            scale *= paper if isinstance(self.qk_scale, str) else self.qk_scale
        return law, scale

    # -- plans of the parameters of a stock model

    def make_plans(self, model: nn.Module) -> dict[str, ParameterPlan]:
        """Return how each parameter of a stock GPT-2 is made, by its path in the model.

        Args:
            model (`nn.Module`):
                A stock GPT-2, with or without a head.

        Returns:
            `dict[str, ParameterPlan]`: plans by the path of the parameter.
        """
        prefix = "transformer." if hasattr(model, "transformer") else ""
        return {
            path: self._plan(model, path.removeprefix(prefix), tuple(parameter.shape))
            for path, parameter in model.named_parameters(remove_duplicate=False)
        }

    def _plan(self, model: Any, path: str, shape: tuple[int, ...]) -> ParameterPlan:
        name, leaf = path.rsplit(".", 1)
        if path == "lm_head.weight" and self.tie_word_embeddings:
            return TiedPlan(model.get_input_embeddings())
        if path == "lm_head.bias":
            return TrainedPlan(self.tensor("head_bias"), shape, self.scale_bits)
        if name.endswith(("ln_1", "ln_2", "ln_f")) or leaf == "bias":
            if leaf == "weight" and self.layer_norm == "trained":
                return TrainedPlan(self.tensor(name), shape, self.scale_bits)
            constant = 1.0 if leaf == "weight" else 0.0
            return FixedPlan(TensorSpec(path, shape, law="constant", scale=constant), shape)
        if name == "wte" and self.embedding_rank:
            rows = self.tensor("wte.rows")
            return LowRankPlan(TrainedPlan(rows, rows.shape, self.embedding_bits), self._masked("wte.basis"))
        if self.kind_of(name) == "frozen":
            return FixedPlan(self.tensor(name), shape)
        if self.kind_of(name) == "trained":
            return TrainedPlan(self.tensor(name), shape, self.embedding_bits)
        if name.endswith("c_attn"):
            return self._masked(*(f"{name}.{part}" for part in ("query", "key", "value")))
        return self._masked(name)

    def _masked(self, *names: str) -> MaskedPlan:
        return self.masked_plan(*(self.tensor(name) for name in names), axis=1 if len(names) > 1 else 0)


# Names of version 0.1 for scales, gains, biases and low-rank tables of a model that learns. Applied in this order.
_NAMES_OF_0_1 = {
    r"scale\.values$": "scale",
    r"\.gain\.values$": ".values",
    r"\.rows\.values$": ".rows_values",
    r"\.basis\.scores$": ".basis_scores",
    r"\.basis\.scale$": ".basis_scale",
    r"^head_bias\.values$": "lm_head.bias_values",
}


class FreeWidthAttention(GPT2Attention):
    """GPT-2's attention with query/key and value widths of their own.

        softmax(q k^T / sqrt(n_qk)) v,   [q, k, v] = c_attn(x),   heads * (2 n_qk + n_v) columns

    Args:
        config ([`SupermaskGPT2Config`]):
            Configuration of the model.
        layer_idx (`int`):
            Number of the block.
    """

    def __init__(self, config: SupermaskGPT2Config, layer_idx: int) -> None:
        nn.Module.__init__(self)  # the stock constructor allows only one width
        self.config, self.layer_idx = config, layer_idx
        self.is_causal, self.is_cross_attention = True, False
        self.num_heads = config.n_head
        self.widths = [config.n_head * width for width in (config.qk_width, config.qk_width, config.v_width)]
        self.scaling = config.qk_width**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1
        self.c_attn = Conv1D(sum(self.widths), config.n_embd)
        self.c_proj = Conv1D(config.n_embd, self.widths[2])
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.attn_pdrop), nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        hidden_states: Any,  # batch, length, n_embd
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.c_attn(hidden_states).split(self.widths, dim=-1)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attn_dropout.p if self.training else 0.0
        mixed, shares = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        mixed = mixed.flatten(-2).contiguous()  # batch, length, heads * n_v
        return self.resid_dropout(self.c_proj(mixed)), shares


class SupermaskGPT2Mixin(SupermaskMixin):
    """What the supermask classes of GPT-2 share: the options that only GPT-2 has.

    Args:
        config ([`SupermaskGPT2Config`]):
            The configuration.
    """

    config_class = SupermaskGPT2Config
    renamed_parameters = _NAMES_OF_0_1
    config: SupermaskGPT2Config

    def __init__(self, config: SupermaskGPT2Config) -> None:
        self._config = config  # the real one; the stock constructor may get another
        super().__init__(_divisible(config))

    @classmethod
    def supermask_class_of(cls, stock_class: type) -> Any:
        """Return the supermask class of the decoder; None for any other module."""
        return SupermaskGPT2Model if stock_class is GPT2Model else None

    def adapt_structure(self) -> None:
        """Add free head widths and a bias of the logits, and remove LayerNorms, as the options say."""
        model: Any = self
        config = self.__dict__.pop("_config", self.config)
        if self.config is not config:
            for module in model.modules():
                if "config" in module.__dict__:
                    module.config = config
        if config.has_free_widths and not isinstance(model.base_model.h[0].attn, FreeWidthAttention):
            for index, block in enumerate(model.base_model.h):
                block.attn = FreeWidthAttention(config, index)
        if config.qk_width != config.v_width:
            self._supports_flash_attn = False  # its kernels need one head width
        if not config.layer_norm:
            for path, module in list(model.named_modules()):
                if isinstance(module, nn.LayerNorm):
                    model.set_submodule(path, nn.Identity())
        if (
            config.head_bias
            and isinstance(getattr(model, "lm_head", None), nn.Linear)
            and model.lm_head.bias is None
        ):
            weight = model.lm_head.weight
            model.lm_head.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))


def _divisible(config: SupermaskGPT2Config) -> SupermaskGPT2Config:
    """Return a configuration that the stock constructor accepts: n_head must divide n_embd."""
    if config.n_embd % config.n_head == 0:
        return config
    stock = copy.deepcopy(config)
    stock.n_head = 1
    return stock


class SupermaskGPT2Model(SupermaskGPT2Mixin, GPT2Model):
    """The bare transformer: token ids to hidden states.

    Args:
        config ([`SupermaskGPT2Config`]):
            Configuration of the model.
    """

    stock_class = GPT2Model


class SupermaskGPT2LMHeadModel(SupermaskGenerationMixin, SupermaskGPT2Mixin, GPT2LMHeadModel):
    """The language model: token ids to logits. A tied head is the token embedding, masked once for both uses.

    Args:
        config ([`SupermaskGPT2Config`]):
            Configuration of the model.

    Example:

    >>> config = SupermaskGPT2Config(n_embd=64, n_head=2, n_layer=1, vocab_size=512, density=0.3, seed=7)
    >>> model = SupermaskGPT2LMHeadModel(config)
    >>> model.to_ticket().num_parameters() == model.merge_and_unload().num_parameters()
    True
    """

    stock_class = GPT2LMHeadModel

    def __init__(self, config: SupermaskGPT2Config) -> None:
        super().__init__(config)
        # Trainer cannot see this from our class name. Without it, it would scale the loss by (length - 1) / length.
        self.loss_type = "ForCausalLM"
        if not self.is_ticket:
            self.loss_function = causal_lm_loss


class SupermaskGPT2ForSequenceClassification(SupermaskGPT2Mixin, GPT2ForSequenceClassification):
    """Classification by the last token that is not padding. The head is masked too.

    Args:
        config ([`SupermaskGPT2Config`]):
            Configuration of the model.
    """

    stock_class = GPT2ForSequenceClassification


AUTO_CLASSES = {
    "AutoModel": SupermaskGPT2Model,
    "AutoModelForCausalLM": SupermaskGPT2LMHeadModel,
    "AutoModelForSequenceClassification": SupermaskGPT2ForSequenceClassification,
}
register_architecture(SupermaskGPT2Config, AUTO_CLASSES)
