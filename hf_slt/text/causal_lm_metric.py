"""Loss, perplexity and bits per byte as a metric of the `evaluate` library.

    metric = evaluate.load("hf_slt/text/causal_lm_metric.py")      # by its path
    metric.compute(predictions=["some text"], model="gpt2")

The library copies this file and evaluation.py into a cache and runs them there. This also works if this package is
not installed.
"""

import datasets
import evaluate

from .evaluation import evaluate_text, load_model

DESCRIPTION = """\
How well a causal language model predicts texts: mean loss in nats per token, perplexity, and bits per
UTF-8 byte, which can compare models with different tokenizers. Each text is a separate document, read through
overlapping windows; every token is predicted exactly once.
"""

INPUTS = """
Args:
    predictions (list of str): the texts.
    model: a causal LM, or the folder or Hub name of one.
    tokenizer: its tokenizer, or the folder or name of one. Not needed for a model given by name.
    block_size (int): inputs in a window; by default as many as the model takes, up to 1024.
    stride (int): tokens from the start of a window to the start of the next; by default half of block_size.
    batch_size (int): windows at a time; 4 by default.
    progress (bool): show a progress bar; False by default.
Returns:
    dict: loss, perplexity, bits_per_byte, tokens, bytes.
"""


class CausalLMMetric(evaluate.Metric):
    """`compute` gives what `evaluate_text` gives."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("string")})
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions, model, tokenizer=None, **options) -> dict[str, float]:
        if isinstance(model, str):
            if not isinstance(tokenizer, (str, type(None))):
                raise ValueError("a model given by name needs a tokenizer by name; or give both as objects")
            model, tokenizer = load_model(model, tokenizer)
        elif tokenizer is None or isinstance(tokenizer, str):
            raise ValueError("a model given as an object needs its tokenizer as an object too: tokenizer=...")
        return evaluate_text(model, tokenizer, predictions, **options)
