"""Write the tables of options in docs/ from the classes that check them.

    python -m scripts.docs.option_tables           # write all tables
    python -m scripts.docs.option_tables --check   # name the pages that are out of date

In a page, a comment marks the place of a table, and names the classes whose options it lists:

    <!-- options: jaxinfer.config.engine:EngineOptions -->
    <!-- systems -->
    <!-- planners -->
    <!-- policies: order -->

The program replaces the table after the comment, up to the next blank line. The meaning of an
option is the first sentence of its entry under ``Attributes`` in the class's docstring. The API
reference has the rest.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jaxinfer.lab.plan.registry import PLANNERS
from jaxinfer.options.validation import Options
from jaxinfer.serving.policies import KINDS
from jaxinfer.systems.registry import SYSTEMS

DOCS = Path(__file__).parents[2] / "docs"
MARK = re.compile(r"^<!-- (options|systems|planners|policies)(?:: (.+))? -->\n", re.MULTILINE)
Row = tuple[str, ...]
Kind = type[Options]


def described(kind: type) -> dict[tuple[str, ...], str]:
    """Return the entries of the docstring of ``kind``, by the names of their attributes."""
    found: dict[tuple[str, ...], str] = {}
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?= {4}\S)", section):
        if entry.strip():
            names, _, text = " ".join(entry.split()).partition(": ")
            found[tuple(names.split(", "))] = text
    return found


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, in markdown for a table cell."""
    sentence = re.split(r"\.(?= [A-Z`]|$)", text, maxsplit=1)[0]
    return sentence.replace("``", "`").replace("|", "\\|").replace("\n", " ")


def literals(annotation: Any) -> list[Any]:
    """Return the values that an annotation names, in its order."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for each in get_args(annotation) for value in literals(each)]


def as_yaml(value: Any) -> str:
    """Return a default as YAML; empty if there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, dict | Options):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def default_of(kind: Kind, name: str) -> str:
    """Return an option's default, then the other values that it may have."""
    field = kind.model_fields[name]
    if field.is_required():
        shown = "required"
    else:
        default = as_yaml(field.get_default(call_default_factory=True))
        shown = f"`{default}`" if default else ""
    others = [
        f"`{as_yaml(value)}`"
        for value in literals(field.annotation)
        if value not in (NoneType, field.default)
    ]
    return "; ".join(filter(None, [shown, ", ".join(others)]))


def option_rows(kind: Kind, inherited: bool = False) -> Iterator[Row]:
    """Yield rows of name, default and meaning.

    Args:
        inherited: whether to include options of base classes.

    Raises:
        LookupError: an option has no entry in the docstring.
    """
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, Options)]
    documented = set()
    for base in bases if inherited else [kind]:
        for names, text in described(base).items():
            fields = [by_alias(kind, name) for name in names]
            documented.update(fields)
            defaults = dict.fromkeys(filter(None, (default_of(kind, field) for field in fields)))
            shown = ", ".join(f"`{name}`" for name in names)
            yield shown, ", ".join(defaults), first_sentence(text)
    own = kind.model_fields if inherited else inspect.get_annotations(kind)
    if missing := {name for name in own if name in kind.model_fields} - documented:
        raise LookupError(f"{kind.__name__}: no entry under Attributes for {sorted(missing)}")


def by_alias(kind: Kind, name: str) -> str:
    """Return the field for a name in a run file."""
    for field, about in kind.model_fields.items():
        if name in (field, about.alias):
            return field
    raise LookupError(f"{kind.__name__}: its docstring has an entry for {name}, no option")


def load(where: str) -> Any:
    """Return the class at ``module:name``."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def named_rows(registry: Mapping[str, str]) -> Iterator[Row]:
    """Yield rows of all options of a registry's classes; the first row of a class has its name."""
    last, before = "", set[Row]()
    for name, where in registry.items():
        rows = list(option_rows(load(where).Options, inherited=True)) or [("none", "", "")]
        if len(before.intersection(rows)) > 2:
            new = [row for row in rows if row not in before]
            shown = [(f"as `{last}`, but:", "", ""), *new]
        else:
            shown = rows
        last, before = name, set(rows)
        for number, row in enumerate(shown):
            yield ("" if number else f"`{name}`", *row)


def policy_rows(kind: str) -> Iterator[Row]:
    """Yield rows of a kind's policies: name, options, and the first sentence of its docstring."""
    for name, policy in KINDS[kind].items():
        options: Any = getattr(policy, "Options", None)
        shown = [
            f"`{option}` ({default_of(options, option).replace('`', '') or 'none'})"
            for option in (options.model_fields if options else ())
        ]
        text = " ".join((inspect.getdoc(policy) or "").split("\n\n")[0].split())
        yield f"`{name}`", ", ".join(shown), first_sentence(text)


def table(what: str, given: str | None) -> str:
    """Return the lines of one table."""
    head: Row
    if what == "options":
        head = "option", "default; others", "meaning"
        rows = [row for each in str(given).split(", ") for row in option_rows(load(each))]
    elif what == "policies":
        head = f"`{given}`", "options", "meaning"
        rows = list(policy_rows(str(given)))
    else:
        head = what.removesuffix("s"), "option", "default; others", "meaning"
        rows = list(named_rows(SYSTEMS if what == "systems" else PLANNERS))
    first, *lines = (f"| {' | '.join(line)} |\n" for line in [head, *rows])
    return "".join([first, f"|{'---|' * len(head)}\n", *lines])


def renewed(text: str) -> str:
    """Return a page's text with all of its tables replaced."""
    parts, at = [], 0
    for found in MARK.finditer(text):
        end = text.find("\n\n", found.end() - 1)
        parts += [text[at : found.end()], table(found[1], found[2])]
        at = len(text) if end < 0 else end + 1
    return "".join([*parts, text[at:]])


def main() -> None:
    """Write or check the tables of all pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            stale.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print("out of date:" if check else "written:", ", ".join(stale))
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
