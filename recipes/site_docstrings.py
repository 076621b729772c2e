"""Docstrings in the style of transformers, as the documentation site reads them.

    density (`float`, defaults to 0.3):          ->      density:
    [`Header`]: the header of the ticket.        ->      Header: the header of the ticket.
    >>> 1 + 1                                    ->      a block of code

The site takes types and defaults from the signature, where they are links; a reader of the code has them beside
the text.
"""

import re

import griffe

PARAMETER = re.compile(r"^([ ]{4}\*{0,2}\w+) \(.*\):$", re.M)
NAME = re.compile(r"\[(`[^`\n]+`)\](?![\[(])")  # what is left of names in brackets
TYPE = re.compile(r"^([ ]{4})\[?`([^`\n]+)`\]?:", re.M)
# Lines from a prompt to the next empty line, where no fence stands before them.
SESSION = re.compile(r"(?<!```python\n)(?<!```pycon\n)^([ ]*)>>> .*\n?(?:[ ]*\S.*\n?)*", re.M)


def rewrite(docstring: str) -> str:
    """Return a docstring as the site reads it.

    Args:
        docstring (`str`):
            A docstring in the style of transformers, without indentation.

    Returns:
        `str`: the same in the style of Google, its examples as blocks of code.
    """
    plain = NAME.sub(r"\1", TYPE.sub(r"\1\2:", PARAMETER.sub(r"\1:", docstring)))
    return SESSION.sub(lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", plain)


class TransformersStyle(griffe.Extension):
    """Rewrites the sections Args, Returns and Raises of every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrite the docstring of one object.

        Args:
            obj (`griffe.Object`):
                A module, class, function or attribute.
            kwargs:
                Not used.
        """
        if obj.docstring is not None:
            obj.docstring.value = rewrite(obj.docstring.value)
