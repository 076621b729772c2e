"""Convert docstrings in the style of transformers to the style that the documentation site reads.

    density (`float`, defaults to 0.3):          ->      density:
    [`Header`]: the header of the ticket.        ->      Header: the header of the ticket.
    >>> 1 + 1                                    ->      a block of code

The site takes types and defaults from the signature, and shows them as links. In the code they are in the docstring,
next to the text.
"""

import re

import griffe

PARAMETER = re.compile(r"^([ ]{4}\*{0,2}\w+) \(.*\):$", re.M)
NAME = re.compile(r"\[(`[^`\n]+`)\](?![\[(])")  # all other names in brackets
TYPE = re.compile(r"^([ ]{4})\[?`([^`\n]+)`\]?:", re.M)
# Lines from a prompt to the next empty line, unless a fence comes before them.
SESSION = re.compile(r"(?<!```python\n)(?<!```pycon\n)^([ ]*)>>> .*\n?(?:[ ]*\S.*\n?)*", re.M)


def rewrite(docstring: str) -> str:
    """Convert one docstring to the style that the site reads.

    Args:
        docstring (`str`):
            A docstring in the style of transformers, without indentation.

    Returns:
        `str`: the docstring in Google style, with its examples as blocks of code.
    """
    plain = NAME.sub(r"\1", TYPE.sub(r"\1\2:", PARAMETER.sub(r"\1:", docstring)))
    return SESSION.sub(lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", plain)


class TransformersStyle(griffe.Extension):
    """Griffe extension that rewrites the sections Args, Returns and Raises of every docstring before it is parsed."""

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
