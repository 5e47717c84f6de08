"""docs/troubleshooting.md explains every error and warning, and none that is gone."""

import ast
import re
from pathlib import Path

import gravac_jax

PACKAGE = Path(gravac_jax.__file__).parent
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"
RAISED = ("Error", "warn", "SystemExit", ".error")  # how a message reaches a user
VARIES = "…"


def message_of(node):
    """Return the text of a string, with `…` for what it is filled with."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(message_of(x) for x in parts)
        case ast.BinOp(left=left, right=right):
            return message_of(left) + message_of(right)
    return VARIES


def messages():
    """Return `file:line message` of all that the package raises or warns of."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func).endswith(RAISED):
                message = message_of(node.args[0])
                # Some pass on what another one says.
                if len(re.findall(r"\w+", max(message.split(VARIES), key=len))) > 1:
                    found.append(f"{file.name}:{node.lineno} {message}")
    return found


def quotations():
    """Return what the first column of the page's tables quotes."""
    text = PAGE.read_text().partition("\n## Errors and warnings\n")[2]
    quoted = re.findall(r"^\| (`+)(.+?)\1(?: \(warning\))? \|", text, re.MULTILINE)
    return [x.strip() if len(ticks) > 1 else x for ticks, x in quoted]


MESSAGES, QUOTATIONS = messages(), quotations()


def test_there_are_messages_and_quotations():
    assert len(MESSAGES) > 100
    assert len(QUOTATIONS) > 100


def test_the_page_explains_every_message():
    is_explained = lambda message: any(x in message for x in QUOTATIONS)
    assert [x for x in MESSAGES if not is_explained(x)] == []  # add a row for each


def test_the_page_quotes_only_what_the_package_says():
    gone = [x for x in QUOTATIONS if not any(x in message for message in MESSAGES)]
    assert gone == []
