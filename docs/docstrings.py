"""Let the site read the package's docstrings, which are written for people."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Makes Markdown of docstrings, before griffe parses them."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object of the package."""
        if obj.docstring:
            lines = map(_markdown, obj.docstring.value.splitlines())
            obj.docstring.value = "\n".join(lines)


def _markdown(line: str) -> str:
    """Return a line whose examples are code and whose powers are not bold."""
    line = re.sub(r"^( *)Example:$", r"\1Examples:", line)  # else `>>>` is a quotation
    if re.match(r" *(>>>|\.\.\.)", line):
        return line
    return re.sub(r"(?<=\d)\*\*(?=-?\d)", r"\*\*", line.replace("::", ":"))
