"""Encodings and controllers as text: what stands after `--send`."""

import ast
from typing import Any

import gravac_jax as gravac

_KINDS = gravac.Encoding | gravac.Controller
_MAKERS: dict[str, Any] = {
    "TopK.exponential": gravac.TopK.exponential,
    "TopK.geometric": gravac.TopK.geometric,
    **{
        name: x
        for name, x in vars(gravac).items()
        if isinstance(x, type) and issubclass(x, _KINDS)
    },
}


def parse(text: str) -> gravac.Encoding | gravac.Controller:
    """Return what a call such as "Bits(2, turns=4)" makes.

    Its arguments are literals, tuples and such calls. Nothing else is run.

    Args:
      text: a call of an encoding or a controller of `gravac_jax`.

    Raises:
      SystemExit: if the text is no such call, or an argument is wrong.
    """
    try:
        made = _value(ast.parse(text.strip(), mode="eval").body)
        if isinstance(made, _KINDS):
            return made
        raise ValueError("it makes no encoding, and no controller")
    except (SyntaxError, TypeError, ValueError) as error:
        why = str(error).rstrip(".")
        raise SystemExit(
            f'{text!r} cannot be sent: {why}. Write an encoding such as "Bits(2,'
            ' turns=4)", or a controller such as "Fastest((Dense(), TopK(100)))"'
        ) from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    if isinstance(node, ast.Name):
        raise ValueError(f"{node.id} is no literal, and no call: {node.id}()")
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = ast.unparse(node.func)
    if name not in _MAKERS:
        raise ValueError(f"there is no {name}; there are: {', '.join(_MAKERS)}")
    options = {x.arg or "": _value(x.value) for x in node.keywords}
    return _MAKERS[name](*map(_value, node.args), **options)
