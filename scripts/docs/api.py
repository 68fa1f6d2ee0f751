"""Write the API reference from docstrings; this needs the extra ``docs``.

python -m scripts.docs.api --out build/docs
"""

import argparse
import pkgutil
from pathlib import Path

import jaxinfer

# A package that needs its own extra.
LEFT_OUT = "ray"


def specs() -> list[str]:
    """Return the package, and all its modules and packages; pdoc finds what is in these."""
    found = [module.name for module in pkgutil.iter_modules(jaxinfer.__path__)]
    return [
        "jaxinfer",
        *(f"jaxinfer.{name}" for name in found if name not in (LEFT_OUT, "__main__")),
    ]


def main() -> None:
    """Write a page for each module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/docs"), help="a folder")
    out = parser.parse_args().out
    import pdoc

    # Names that the package imports when they are used.
    vars(jaxinfer).update({name: getattr(jaxinfer, name) for name in jaxinfer.__all__})
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*specs(), output_directory=out)
    print(f"{out}/jaxinfer.html")


if __name__ == "__main__":
    main()
